// still::HybridAttention: converts a node's attributes and a call's shapes to the kernels' layer.
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

Layer read_attributes(still::Op const& op, bool half)
{
    Layer l{};
    l.chunk = integer(op, "chunk_size", 1);
    l.salient = integer(op, "salient_per_chunk", 0);
    l.scope = static_cast<Scope>(choice(op, "select_scope")); // choices have the order of the enums
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

// Adds the sizes from the shapes; throws if they contradict the attributes.
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
void check_slots(still::OpSpec const& spec, Layer const& l, int batch, int64_t tokens, int64_t const* past, int64_t const* brought)
{
    for (int row = 0; row < batch; ++row)
    {
        check_counts(spec, row, past[row], brought[row], tokens);
        int64_t const length = past[row] + brought[row];
        int64_t const slots = l.salient * std::max<int64_t>(0, (length + l.chunk - 1) / l.chunk - 2);
        if (l.overflow == Overflow::kError && slots > l.slots)
            fail("HybridAttention: sequence ", row, " grows to ", length, " tokens, which fill ", slots, " salient slots; the state has ",
                l.slots, ". Give a larger state.");
    }
}

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half) : LayerKernel(op, half), layer_(read_attributes(op, half)) {}

private:
    Layer read_layer(still::Call const& call) const override { return read_shapes(layer_, call); }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        int64_t const *const past = call.counts("past_length"), *const brought = call.counts("new_tokens");
        check_slots(op_.spec(), sizes.layer, sizes.batch, sizes.tokens, past, brought);
        Tensors x{};
        x.query = call.input("query"), x.key = call.input("key"), x.value = call.input("value"), x.gate = call.input("gate");
        x.feature_q_weight = call.input("feature_q_weight"), x.feature_k_weight = call.input("feature_k_weight");
        x.window_factor = call.input<float>("window_factor");
        x.output = output;
        x.window_key = call.kept("past_window_key"), x.window_value = call.kept("past_window_value");
        x.window_score = call.state<float>("past_window_score");
        x.salient_key = call.kept("past_salient_key"), x.salient_value = call.kept("past_salient_value");
        x.kv_state = call.state<float>("past_kv_state"), x.z_state = call.state<float>("past_z_state");
        x.tokens = sizes.tokens;
        hybrid_attention(sizes.layer, x, sizes.batch, past, brought, call);
    }

    Layer layer_;
};

} // namespace

Entry hybrid_attention_entry()
{
    return entry_of<Node>("HybridAttention");
}

} // namespace still_cpu
