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

constexpr int64_t kStatistics = 3;      // numbers kept per row of a chunk
constexpr int64_t kEvictedRows = 32;    // newcomers that fold_* policies hold per head

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The sizes that grids and workspace follow from.
struct Sizes
{
    Sizes(Call const& call, Variant const& variant, int64_t batch_size, int64_t token_count)
        : batch(batch_size), tokens(token_count), heads(call.size("H")), select_heads(call.size("HS")), head_dim(call.size("D")),
          features(call.size("F")), chunk(call.size("C")), slots(call.size("N")), tiles(ceil_div(token_count, chunk) + 1),
          rows(tiles + 2), segment(std::min(variant.constant("segment_tiles"), tiles)), folds(call.text("overflow") != "error"),
          element_bytes(type_bytes(call.activation)), splits(decode_splits(variant))
    {
    }

    int64_t decode_splits(Variant const& variant) const
    {
        int64_t const wanted = ceil_div(slots, variant.constant("decode_split_slots"));
        return std::max<int64_t>(1, std::min(wanted, variant.constant("decode_max_splits")));
    }

    int64_t batch;
    int64_t tokens;
    int64_t heads;
    int64_t select_heads;
    int64_t head_dim;
    int64_t features;
    int64_t chunk;
    int64_t slots;
    int64_t tiles; // chunks that a call of `tokens` may touch, wherever it begins
    int64_t rows;  // tiles and the two chunks before them
    int64_t segment;
    bool folds;
    size_t element_bytes;
    int64_t splits;
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
        workspace(call, variant, sizes, builder, arguments);
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
        workspace(call, variant, Sizes(call, variant, batch, tokens), builder, arguments);
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
        arguments["K"] = number(call.integer("salient_per_chunk"));
        arguments["N"] = number(sizes.slots);
        arguments["W_HEADS"] = number(call.tensor("feature_q_weight").dims[0]);
        arguments["R"] = number(sizes.rows);
        arguments["NS"] = number(sizes.splits);
        arguments["phantom"] = number(call.integer("phantom_first_chunk"));
        arguments["scale"] = PlanBuilder::real(1.0 / std::sqrt(static_cast<double>(sizes.head_dim)));
        arguments["epsilon"] = PlanBuilder::real(call.real("mix_epsilon"));
        return arguments;
    }

    // Names the regions that the call's kernels use; adds up their bytes in the builder.
    static void workspace(Call const& call, Variant const&, Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments)
    {
        constexpr size_t f32 = 4;
        auto const region = [&](char const* name, size_t element, std::initializer_list<int64_t> shape) {
            size_t bytes = element;
            for (int64_t const size : shape)
                bytes *= static_cast<size_t>(size);
            arguments[name] = builder.region(bytes);
        };
        for (char const* name : {"score", "stats", "flags", "evicted_key", "evicted_value", "evicted_count", "prefix_kv", "prefix_z",
                 "part_acc", "part_ml", "part_lin", "part_den", "part_score"})
            arguments[name] = {};
        bool const decode = s.tokens == 1;
        if (!decode || s.folds)
        {
            region("score", f32, {s.batch * s.tokens, s.heads});
            region("stats", f32, {s.batch, s.rows, s.heads, kStatistics, s.chunk});
            region("flags", 1, {s.batch, s.rows, s.select_heads, s.chunk});
            size_t const prefix = call.activation == Type::kFloat32 ? f32 : 2;
            region("prefix_kv", prefix, {s.batch, s.segment, s.heads, s.features, s.head_dim});
            region("prefix_z", f32, {s.batch, s.segment, s.heads, s.features});
        }
        if (s.folds)
        {
            region("evicted_key", s.element_bytes, {s.batch, s.select_heads, kEvictedRows, s.head_dim});
            region("evicted_value", s.element_bytes, {s.batch, s.select_heads, kEvictedRows, s.head_dim});
            region("evicted_count", f32, {s.batch, s.select_heads});
        }
        if (decode)
        {
            region("part_acc", f32, {s.batch, s.heads, s.splits + 1, s.head_dim});
            region("part_ml", f32, {s.batch, s.heads, s.splits + 1, 2});
            region("part_lin", f32, {s.batch, s.heads, s.head_dim});
            region("part_den", f32, {s.batch, s.heads});
            region("part_score", f32, {s.batch, s.heads});
            arguments["counters"] = builder.persistent(f32 * static_cast<size_t>(s.batch * 2 * s.heads));
        }
        else
            arguments["counters"] = {};
    }

    static void segment(Variant const& variant, Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments, int64_t first, int64_t count)
    {
        arguments["first_tile"] = PlanBuilder::number(first);
        arguments["n_tiles"] = PlanBuilder::number(count);
        builder.kernel("scan", {variant.constant("scan_programs"), s.heads, s.batch}, arguments);
        int64_t const programs = ceil_div(count * variant.constant("subtiles"), variant.constant("tiles_per_program"));
        builder.kernel("attend", {programs, s.heads, s.batch}, arguments);
    }

    static void prefill(Variant const& variant, Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments)
    {
        arguments["first_tile"] = PlanBuilder::number(0);
        arguments["n_tiles"] = PlanBuilder::number(s.tiles);
        builder.kernel("score", {s.rows, s.heads, s.batch}, arguments);
        if (!s.folds)
            builder.kernel("select", {s.tiles, s.select_heads, s.batch}, arguments);
        int64_t const step = s.folds ? 1 : s.segment; // folding decides chunk by chunk
        for (int64_t first = 0; first < s.tiles; first += step)
        {
            int64_t const count = std::min(step, s.tiles - first);
            arguments["first_tile"] = PlanBuilder::number(first);
            arguments["n_tiles"] = PlanBuilder::number(count);
            if (s.folds)
                builder.kernel("select", {1, s.select_heads, s.batch}, arguments);
            segment(variant, s, builder, arguments, first, count);
        }
        builder.kernel("commit", {s.heads, s.batch, 1}, arguments);
    }

    static void decode(Variant const& variant, Sizes const& s, PlanBuilder& builder, PlanBuilder::Arguments& arguments)
    {
        arguments["first_tile"] = PlanBuilder::number(0);
        arguments["n_tiles"] = PlanBuilder::number(1);
        if (s.folds)
        {
            builder.kernel("select", {1, s.select_heads, s.batch}, arguments);
            builder.kernel("scan", {variant.constant("scan_programs"), s.heads, s.batch}, arguments);
        }
        int64_t const group = s.heads / s.select_heads;
        builder.kernel("decode", {s.splits + variant.constant("value_slices") * group + group, s.select_heads, s.batch}, arguments);
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
