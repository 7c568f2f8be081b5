// still::HybridAttention: from a node's attributes and a call's shapes to the layer that the kernels know.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "hybrid_attention.h"

#include <algorithm>
#include <limits>

namespace still_cpu
{
namespace
{

using namespace hybrid;
using still::fail;

// Places of the inputs.
enum Input
{
    kQuery,
    kKey,
    kValue,
    kGate,
    kFeatureQWeight,
    kFeatureKWeight,
    kWindowFactor,
    kNewTokens,
    kPastLength,
    kPastWindowKey,
    kPastWindowValue,
    kPastWindowScore,
    kPastSalientKey,
    kPastSalientValue,
    kPastKvState,
    kPastZState,
    kPastWindowKeyScale,
    kPastWindowValueScale,
    kPastSalientKeyScale,
    kPastSalientValueScale,
};

Layer read_attributes(still::Op const& op, bool half)
{
    Layer l{};
    l.chunk = integer(op, "chunk_size", 1);
    l.salient = integer(op, "salient_per_chunk", 0);
    l.scope = static_cast<Scope>(choice(op, "select_scope")); // choices stand in the order of the enums
    l.saliency = static_cast<Saliency>(choice(op, "saliency"));
    l.map = static_cast<FeatureMap>(choice(op, "feature_map"));
    l.sliding = choice(op, "local") == 1;
    l.window = integer(op, "window_size", 0);
    l.window = l.window ? l.window : l.chunk;
    l.epsilon = static_cast<float>(op.attributes().at("mix_epsilon").real);
    l.phantom = integer(op, "phantom_first_chunk", 0) != 0;
    l.overflow = static_cast<Overflow>(choice(op, "overflow"));
    l.half = half;
    if (l.salient > l.chunk || l.window > l.chunk || (l.sliding && l.salient && l.window != l.chunk) || (l.sliding && l.phantom))
        fail("HybridAttention: chunk_size, salient_per_chunk, window_size and phantom_first_chunk contradict each other.");
    return l;
}

// Completes the layer by the shapes; throws where they contradict the attributes.
Layer read_shapes(Layer layer, still::Call const& call)
{
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    check_heads(call);
    layer.heads = dimension(call, "H");
    layer.kv_heads = dimension(call, "HK");
    layer.dim = dimension(call, "D");
    layer.rows = dimension(call, "P");
    layer.weight_heads = static_cast<int>(call.weights.at("H"));
    layer.slots = dimension(call, "N", 0, most);
    layer.cache = cache_of(call, layer.half);
    bool const both = layer.map == FeatureMap::kNormPreserved || layer.map == FeatureMap::kSoftmaxBothSigns;
    layer.features = layer.rows * (both ? 2 : 1);
    auto const demand = [&](char const* tensor, char const* symbol, int64_t wanted) {
        if (call.size(symbol) != wanted)
            fail("HybridAttention: ", tensor, " is ", call.tensor(tensor).shape(), " with ", symbol, "=", call.size(symbol),
                "; the attributes need ", symbol, "=", wanted, ".");
    };
    demand("past_window_key", "C", layer.chunk);
    demand("past_salient_key", "HS", layer.select_heads());
    demand("past_kv_state", "F", layer.features);
    if (layer.overflow != Overflow::kError && layer.slots % std::max(1, layer.salient))
        fail("HybridAttention: past_salient_key has ", layer.slots, " slots; with overflow=\"fold_oldest\" they are a multiple of ",
            "salient_per_chunk=", layer.salient, ".");
    return layer;
}

// Throws for counts outside their range and for sequences that outgrow the salient cache.
void check_slots(still::OpSpec const& spec, StateSizes<Layer> const& sizes, int64_t const* past, int64_t const* brought)
{
    Layer const& l = sizes.layer;
    for (int row = 0; row < sizes.batch; ++row)
    {
        check_counts(spec, row, past[row], brought[row], sizes.tokens);
        int64_t const length = past[row] + brought[row];
        int64_t const slots = l.salient * std::max<int64_t>(0, (length + l.chunk - 1) / l.chunk - 2);
        if (l.overflow == Overflow::kError && slots > l.slots)
            fail("HybridAttention: sequence ", row, " grows to ", length, " tokens, which fill ", slots, " salient slots; the state has ",
                l.slots, ". Give a larger state.");
    }
}

class Node : public StateKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : StateKernel(op, half,
            {"query", "key", "value", "gate", "feature_q_weight", "feature_k_weight", "window_factor", "new_tokens", "past_length",
                "past_window_key", "past_window_value", "past_window_score", "past_salient_key", "past_salient_value",
                "past_kv_state", "past_z_state", "past_window_key_scale", "past_window_value_scale", "past_salient_key_scale",
                "past_salient_value_scale"}),
          layer_(read_attributes(op, half))
    {
    }

    void compute(HostCall& call) override
    {
        StateSizes<Layer> const sizes = this->sizes(call);
        int64_t const *const past = call.counts(kPastLength), *const brought = call.counts(kNewTokens);
        check_slots(op_.spec(), sizes, past, brought);
        Tensors x{};
        x.query = call.input(kQuery), x.key = call.input(kKey), x.value = call.input(kValue), x.gate = call.input(kGate);
        x.feature_q_weight = call.input(kFeatureQWeight), x.feature_k_weight = call.input(kFeatureKWeight);
        x.window_factor = static_cast<float const*>(call.input(kWindowFactor));
        x.output = call.output(0, sizes.output);
        x.window_key = call.kept(kPastWindowKey, kPastWindowKeyScale);
        x.window_value = call.kept(kPastWindowValue, kPastWindowValueScale);
        x.window_score = static_cast<float*>(call.state(kPastWindowScore));
        x.salient_key = call.kept(kPastSalientKey, kPastSalientKeyScale);
        x.salient_value = call.kept(kPastSalientValue, kPastSalientValueScale);
        x.kv_state = static_cast<float*>(call.state(kPastKvState)), x.z_state = static_cast<float*>(call.state(kPastZState));
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(scratch_size(sizes.layer, sizes.batch, sizes.tokens));
        hybrid_attention(sizes.layer, x, sizes.batch, past, brought, scratch, call.host, call.instruction_set);
    }

private:
    Layer read_layer(still::Call const& call) const override { return read_shapes(layer_, call); }

    Layer layer_;
};

} // namespace

Entry hybrid_attention_entry()
{
    return entry_of<Node>("HybridAttention");
}

} // namespace still_cpu
