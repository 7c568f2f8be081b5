// Launches of still::HybridAttention. The one file of the core that knows an op; it mirrors the launcher in
// kernels/still_kernels/hybrid_attention/, and the archive's index version guards that both agree.
#include "error.h"
#include "op.h"

#include <algorithm>
#include <cmath>

namespace still
{
namespace
{

constexpr size_t kFloatBytes = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Programs that share the salient cache of one select head: enough to fill the chip, 32 slots each at least, 24 at most.
int64_t decode_splits(int64_t batch, int64_t select_heads, int64_t slots, int64_t programs)
{
    if (slots == 0)
        return 1;
    int64_t const fill = ceil_div(programs, batch * select_heads);
    int64_t const wanted = std::max(fill, ceil_div(slots, 512));
    return std::max<int64_t>(1, std::min({ceil_div(slots, 32), wanted, int64_t{24}}));
}

// The sizes that grids and workspace follow from.
struct Sizes
{
    Sizes(Call const& call, Variant const& variant, int64_t batch_size, int64_t token_count)
        : batch(batch_size), tokens(token_count), heads(call.size("H")), select_heads(call.size("HS")), head_dim(call.size("D")),
          features(call.size("F")), chunk(call.size("C")), slots(call.size("N")), tiles((token_count + chunk - 2) / chunk + 1),
          folds(call.text("overflow") != "error"), segment(folds ? 1 : std::min(variant.constant("segment_tiles"), tiles)),
          splits(decode_splits(batch_size, select_heads, slots, variant.constant("decode_programs"))),
          stored(ceil_div(segment, variant.constant("prefix_every"))), window_parts(variant.constant("window_parts")), evicted_rows(folds ? variant.constant("evicted_rows") : 0), element_bytes(type_bytes(call.activation)),
          linear_bytes(call.activation == Type::kFloat32 ? 4 : 2)
    {
    }

    int64_t batch;
    int64_t tokens;
    int64_t heads;
    int64_t select_heads;
    int64_t head_dim;
    int64_t features;
    int64_t chunk;
    int64_t slots;
    int64_t tiles; // chunks that a call of `tokens` touches at most, wherever it begins
    bool folds;
    int64_t segment;
    int64_t splits;
    int64_t stored; // chunks of a segment whose S is stored
    int64_t window_parts; // of the ring in decode
    int64_t evicted_rows; // rows that a folding policy may move out of the cache at once
    size_t element_bytes;
    size_t linear_bytes; // of the linear part's operands
};

class HybridAttentionPlanner final : public Planner
{
public:
    void check(Call const& call) const override
    {
        if (call.integer("chunk_size") != call.size("C"))
            call.refuse("past_window_key holds 2*C=" + std::to_string(call.size("2*C")) + " tokens, chunk_size is "
                + std::to_string(call.integer("chunk_size")) + ".");
        if (call.size("H") % call.size("HK"))
            call.refuse("query has H=" + std::to_string(call.size("H")) + " heads, which is no multiple of HK="
                + std::to_string(call.size("HK")) + " of key.");
        int64_t const selecting = call.text("select_scope") == "q_head" ? call.size("H") : call.size("HK");
        if (call.size("HS") != selecting)
            call.refuse("past_salient_key has " + std::to_string(call.size("HS")) + " heads; select_scope="
                + call.text("select_scope") + " needs " + std::to_string(selecting) + ".");
        bool const signs = call.text("feature_map").size() > 3 && call.text("feature_map").rfind("_pm") == call.text("feature_map").size() - 3;
        if (call.size("F") != call.size("P") * (signs ? 2 : 1))
            call.refuse("past_kv_state has F=" + std::to_string(call.size("F")) + " features; feature_map=" + call.text("feature_map")
                + " makes " + std::to_string(call.size("P") * (signs ? 2 : 1)) + " of P=" + std::to_string(call.size("P")) + ".");
        if (call.has("past_salient_score") != (call.text("overflow") == "fold_min_score"))
            call.refuse("past_salient_score goes with overflow=fold_min_score and with nothing else; overflow=" + call.text("overflow") + ".");
        if (call.text("local") != "chunked")
            call.refuse("local=\"" + call.text("local") + "\" has no kernel; the kernels have \"chunked\". Export for onnxruntime, which runs "
                "the function body.");
    }

    Key key(Call const& call) const override
    {
        Key key;
        key["chunk_size"] = std::to_string(call.integer("chunk_size"));
        for (char const* name : {"feature_map", "select_scope", "saliency", "overflow"})
            key[name] = call.text(name);
        key["gate"] = call.has("gate") ? "1" : "0";
        key["window_factor"] = call.has("window_factor") ? "1" : "0";
        if (call.activation != Type::kNone)
            key["dtype"] = type_name(call.activation);
        if (call.count != Type::kNone)
            key["count_dtype"] = type_name(call.count);
        if (call.knows("D"))
            key["head_dim"] = std::to_string(call.size("D"));
        if (call.knows("P"))
            key["feature_rows"] = std::to_string(call.size("P"));
        return key;
    }

    size_t workspace_bytes(Call const& largest, Variant const& variant) const override
    {
        int64_t const batch = largest.size("B");
        int64_t const tokens = largest.size("T");
        size_t bytes = 0;
        // Decode splits depend on the batch, so a smaller batch may need more.
        for (int64_t rows = 1; rows <= batch; ++rows)
            bytes = std::max(bytes, measured(largest, variant, rows, 1));
        if (tokens > 1)
            bytes = std::max(bytes, measured(largest, variant, batch, tokens));
        return bytes;
    }

    void plan(Call const& call, Variant const& variant, PlanBuilder& builder) const override
    {
        for (TensorSpec const* output : *call.outputs)
            if (output->state)
                builder.copy(builder.output(output->name), builder.input("past_" + output->name.substr(8)), call.tensor(output->name).bytes());
        Sizes const sizes(call, variant, call.size("B"), call.size("T"));
        if (sizes.tokens == 0 || sizes.batch == 0)
            return;
        PlanBuilder::Arguments arguments = common(call, sizes, builder);
        workspace(sizes, builder, arguments);
        if (sizes.tokens == 1)
            decode(variant, sizes, builder, arguments);
        else
            prefill(variant, sizes, builder, arguments);
    }

private:
    static size_t measured(Call const& call, Variant const& variant, int64_t batch, int64_t tokens)
    {
        PlanBuilder builder(call, variant);
        PlanBuilder::Arguments arguments;
        workspace(Sizes(call, variant, batch, tokens), builder, arguments);
        return builder.take().workspace_bytes;
    }

    static PlanBuilder::Arguments common(Call const& call, Sizes const& sizes, PlanBuilder const& builder)
    {
        PlanBuilder::Arguments arguments;
        for (TensorSpec const& input : call.spec->inputs)
            if (!input.state)
                arguments[input.name] = builder.input(input.name);
        // The kernels work in place on the present state.
        for (TensorSpec const& output : call.spec->outputs)
            arguments[output.state ? output.name.substr(8) : output.name] = builder.output(output.name);
        arguments["query_start"] = {}; // ragged batches: not through this op
        arguments["state_row"] = {};
        auto const number = PlanBuilder::number;
        arguments["B"] = number(sizes.batch);
        arguments["T"] = number(sizes.tokens);
        arguments["H"] = number(sizes.heads);
        arguments["HK"] = number(call.size("HK"));
        arguments["HS"] = number(sizes.select_heads);
        arguments["G"] = number(sizes.heads / call.size("HK"));
        arguments["K"] = number(call.integer("salient_per_chunk"));
        arguments["N"] = number(sizes.slots);
        arguments["W_HEADS"] = number(call.tensor("feature_q_weight").dims[0]);
        arguments["R"] = number(sizes.tiles + 2);
        arguments["NS"] = number(sizes.splits);
        arguments["phantom"] = number(call.integer("phantom_first_chunk"));
        arguments["scale"] = PlanBuilder::real(1.0 / std::sqrt(static_cast<double>(sizes.head_dim)));
        arguments["epsilon"] = PlanBuilder::real(call.real("mix_epsilon"));
        return arguments;
    }

    // Names the regions that the call's kernels use; adds up their bytes in the builder.
    static void workspace(Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments)
    {
        auto const region = [&](char const* name, size_t element, std::initializer_list<int64_t> shape) {
            size_t bytes = element;
            for (int64_t const size : shape)
                bytes *= static_cast<size_t>(size);
            arguments[name] = builder.region(bytes);
        };
        for (char const* name : {"score", "flags", "prefix_kv", "prefix_z", "linear", "linear_sum", "phi_k", "evicted_key", "evicted_value",
                 "evicted_count", "part_acc", "part_ml", "part_window", "part_lin", "part_den", "counters"})
            arguments[name] = {};
        bool const decode = s.tokens == 1;
        if (!decode)
        {
            region("score", kFloatBytes, {s.batch * s.tokens, s.heads});
            region("prefix_kv", s.linear_bytes, {s.batch, s.stored, s.heads, s.features, s.head_dim});
            region("prefix_z", kFloatBytes, {s.batch, s.stored, s.heads, s.features});
            region("linear", s.linear_bytes, {s.batch, s.segment, s.heads, s.chunk, s.head_dim});
            region("linear_sum", kFloatBytes, {s.batch, s.segment, s.heads, s.chunk});
        }
        else
        {
            int64_t const parts = s.splits + s.window_parts + 1;
            region("part_acc", kFloatBytes, {s.batch, s.heads, parts, s.head_dim});
            region("part_ml", kFloatBytes, {s.batch, s.heads, parts, 2});
            region("part_window", kFloatBytes, {s.batch, s.heads, s.window_parts, 4});
            region("part_lin", kFloatBytes, {s.batch, s.heads, s.head_dim});
            region("part_den", kFloatBytes, {s.batch, s.heads});
            // Never read: the chunk that a step promotes lies in the ring.
            arguments["score"] = builder.output("present_window_score");
            arguments["counters"] = builder.persistent(kFloatBytes * static_cast<size_t>(s.batch * 2 * s.heads));
        }
        if (decode && s.folds) // named by the kernels, not written in decode
        {
            region("prefix_kv", s.linear_bytes, {16});
            region("prefix_z", kFloatBytes, {16});
        }
        if (!decode || s.folds)
        {
            region("flags", 1, {s.batch, s.tiles + 2, s.select_heads, s.chunk});
            region("phi_k", s.linear_bytes, {s.batch, s.segment, s.heads, s.chunk + s.evicted_rows, s.features});
        }
        if (s.folds)
        {
            region("evicted_key", s.element_bytes, {s.batch, s.select_heads, s.evicted_rows, s.head_dim});
            region("evicted_value", s.element_bytes, {s.batch, s.select_heads, s.evicted_rows, s.head_dim});
            region("evicted_count", kFloatBytes, {s.batch, s.select_heads});
        }
    }

    static void prefill(Variant const& variant, Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments)
    {
        auto const number = PlanBuilder::number;
        arguments["first_tile"] = number(0);
        arguments["n_tiles"] = number(s.tiles);
        arguments["store_prefix"] = number(1);
        builder.kernel("score", {s.tiles * variant.constant("score_blocks_per_chunk"), s.heads, s.batch}, arguments);
        if (!s.folds)
            builder.kernel("select", {s.tiles, s.select_heads, s.batch}, arguments);
        for (int64_t first = 0; first < s.tiles; first += s.segment)
        {
            int64_t const count = std::min(s.segment, s.tiles - first);
            arguments["first_tile"] = number(first);
            arguments["n_tiles"] = number(count);
            if (s.folds) // the cache is right for one chunk at a time
                builder.kernel("select", {1, s.select_heads, s.batch}, arguments);
            builder.kernel("features", {ceil_div(count, variant.constant("features_tiles")), s.heads, s.batch}, arguments);
            builder.kernel("scan", {variant.constant("scan_programs"), s.heads, s.batch}, arguments);
            builder.kernel("linear", {ceil_div(count * s.chunk, variant.constant("linear_rows")), s.heads, s.batch}, arguments);
            builder.kernel("attend", {ceil_div(count * s.chunk, variant.constant("attend_rows")), s.heads, s.batch}, arguments);
        }
        builder.kernel("commit", {s.heads, s.batch, 1}, arguments);
    }

    static void decode(Variant const& variant, Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments)
    {
        auto const number = PlanBuilder::number;
        arguments["first_tile"] = number(0);
        arguments["n_tiles"] = number(1);
        arguments["store_prefix"] = number(0);
        if (s.folds)
        {
            builder.kernel("select", {1, s.select_heads, s.batch}, arguments);
            builder.kernel("features", {1, s.heads, s.batch}, arguments);
            builder.kernel("scan", {variant.constant("scan_programs"), s.heads, s.batch}, arguments);
        }
        int64_t const jobs = variant.constant("value_slices") + s.window_parts + 1;
        builder.kernel("decode", {s.heads / s.select_heads * jobs + s.splits, s.select_heads, s.batch}, arguments);
    }
};

} // namespace

Planner const& planner(std::string const& op)
{
    static HybridAttentionPlanner const hybrid_attention;
    if (op == "HybridAttention")
        return hybrid_attention;
    fail(op, ": this library has no kernels for this op.");
}

} // namespace still
