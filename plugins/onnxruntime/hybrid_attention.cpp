#include "hybrid_attention.h"

#include <algorithm>

#include "kernel.h"

namespace still_ort
{
namespace hybrid
{

using namespace still_cpu::hybrid;

still::OpSpec const& op_spec()
{
    static still::OpSpec const& spec = spec_with("HybridAttention",
        {"query", "key", "value", "gate", "feature_q_weight", "feature_k_weight", "window_factor", "new_tokens", "past_length",
            "past_window_key", "past_window_value", "past_window_score", "past_salient_key", "past_salient_value",
            "past_salient_score", "past_kv_state", "past_z_state"});
    return spec;
}

Layer read_attributes(Attributes const& attributes, bool half)
{
    still::OpSpec const& spec = op_spec();
    Layer l{};
    l.chunk = static_cast<int>(number(spec, attributes, "chunk_size", 1));
    l.salient = static_cast<int>(number(spec, attributes, "salient_per_chunk", 0));
    l.scope = static_cast<Scope>(choice(spec, attributes, "select_scope")); // choices stand in the order of the enums
    l.saliency = static_cast<Saliency>(choice(spec, attributes, "saliency"));
    l.map = static_cast<FeatureMap>(choice(spec, attributes, "feature_map"));
    l.sliding = choice(spec, attributes, "local") == 1;
    l.window = static_cast<int>(number(spec, attributes, "window_size", 0));
    l.window = l.window ? l.window : l.chunk;
    l.epsilon = attributes.real("mix_epsilon", 1e-6f);
    l.phantom = number(spec, attributes, "phantom_first_chunk", 0) != 0;
    l.overflow = static_cast<Overflow>(choice(spec, attributes, "overflow"));
    l.half = half;
    if (l.salient > l.chunk || l.window > l.chunk || (l.sliding && l.salient && l.window != l.chunk) || (l.sliding && l.phantom))
        throw Refused("still::HybridAttention: chunk_size, salient_per_chunk, window_size and phantom_first_chunk contradict each other.");
    return l;
}

Sizes read_shapes(Layer layer, Shapes const& shapes)
{
    bool const both = layer.map == FeatureMap::kNormPreserved || layer.map == FeatureMap::kSoftmaxBothSigns;
    Symbols known = read_symbols(op_spec(), shapes, {{"2*C", 2 * static_cast<int64_t>(layer.chunk)}},
        [&](std::string const& symbol, int64_t size, Symbols& symbols)
        {
            if (symbol == "P")
                symbols.emplace("F", size * (both ? 2 : 1));
            if (symbol == "HK")
                symbols.emplace("HS", layer.scope == Scope::kHead ? symbols["H"] : size);
        });
    check_dimensions(op_spec(), known, {"H", "HK", "D", "P"});
    if ((layer.overflow == Overflow::kFoldMinScore) != shapes[kPastSalientScore].has_value())
        throw Refused("still::HybridAttention: past_salient_score goes with overflow=\"fold_min_score\", and only with it.");
    layer.heads = static_cast<int>(known["H"]);
    layer.kv_heads = static_cast<int>(known["HK"]);
    layer.dim = static_cast<int>(known["D"]);
    layer.rows = static_cast<int>(known["P"]);
    layer.features = static_cast<int>(known["F"]);
    layer.weight_heads = static_cast<int>(known["WH"]);
    layer.slots = known["N"];
    return {layer, static_cast<int>(known["B"]), known["T"]};
}

void check_counts(Sizes const& sizes, int64_t const* past, int64_t const* brought)
{
    Layer const& l = sizes.layer;
    for (int row = 0; row < sizes.batch; ++row)
    {
        check_range(op_spec(), row, past[row], brought[row], sizes.tokens);
        int64_t const length = past[row] + brought[row];
        int64_t const slots = l.salient * std::max<int64_t>(0, (length + l.chunk - 1) / l.chunk - 2);
        if (l.overflow == Overflow::kError && slots > l.slots)
            throw Refused("still::HybridAttention: row " + std::to_string(row) + " grows to " + std::to_string(length)
                          + " tokens, which fill " + std::to_string(slots) + " salient slots; the state has " + std::to_string(l.slots)
                          + ". Give a larger state.");
    }
}

namespace
{

class Node : public Kernel
{
public:
    explicit Node(Layer const& layer) : layer_(layer) {}

    void compute(Call& call) override
    {
        Sizes const sizes = sizes_.of(call.shapes, [&](Shapes const& shapes) { return read_shapes(layer_, shapes); });
        int64_t const *const past = call.counts(kPastLength), *const brought = call.counts(kNewTokens);
        check_counts(sizes, past, brought);
        Tensors x{};
        x.query = call.input(kQuery), x.key = call.input(kKey), x.value = call.input(kValue), x.gate = call.input(kGate);
        x.feature_q_weight = call.input(kFeatureQWeight), x.feature_k_weight = call.input(kFeatureKWeight);
        x.window_factor = static_cast<float const*>(call.input(kWindowFactor));
        x.output = call.output(0, *call.shapes[kQuery]);
        x.window_key = call.state(kPastWindowKey), x.window_value = call.state(kPastWindowValue);
        x.window_score = static_cast<float*>(call.state(kPastWindowScore));
        x.salient_key = call.state(kPastSalientKey), x.salient_value = call.state(kPastSalientValue);
        x.salient_score = static_cast<float*>(call.state(kPastSalientScore));
        x.kv_state = static_cast<float*>(call.state(kPastKvState)), x.z_state = static_cast<float*>(call.state(kPastZState));
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(scratch_size(sizes.layer, sizes.batch, sizes.tokens));
        still_cpu::hybrid::hybrid_attention(sizes.layer, x, sizes.batch, past, brought, scratch, call.host, call.instruction_set);
    }

private:
    Layer layer_;
    Remembered<Sizes> sizes_;
};

} // namespace
} // namespace hybrid

std::unique_ptr<Kernel> make_hybrid_attention(Attributes const& attributes, bool half)
{
    return std::make_unique<hybrid::Node>(hybrid::read_attributes(attributes, half));
}

} // namespace still_ort
