// still::CausalConv: from a call's shapes to the layer that the kernels know.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "causal_conv.h"

namespace still_cpu
{
namespace
{

using convolution::Layer;

// Places of the inputs.
enum Input
{
    kInput,
    kWeight,
    kBias,
    kNewTokens,
    kPastState
};

class Node : public StateKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : StateKernel(op, half, {"input", "weight", "bias", "new_tokens", "past_conv_state"}), silu_(choice(op, "activation") == 1)
    {
    }

    void compute(HostCall& call) override
    {
        StateSizes<Layer> const sizes = this->sizes(call);
        int64_t const* const brought = call.counts(kNewTokens);
        check_rows(op_.spec(), sizes.batch, nullptr, brought, sizes.tokens);
        convolution::Tensors x{};
        x.input = call.input(kInput), x.weight = call.input(kWeight), x.bias = call.input(kBias);
        x.output = call.output(0, sizes.output);
        x.state = call.state(kPastState);
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(convolution::scratch_size(sizes.layer, sizes.batch));
        convolution::convolve(sizes.layer, x, sizes.batch, brought, scratch, call.host, call.instruction_set);
    }

private:
    Layer read_layer(still::Call const& call) const override
    {
        Layer const layer{dimension(call, "C", 1, 1 << 24), dimension(call, "K", 2, 256), silu_, half_};
        if (call.size("P") != layer.taps - 1)
            still::fail("CausalConv: ", layer.taps, " taps with ", call.size("P"), " columns of state; expected one less.");
        // Weights of other ops may have a dimension of 1 for all heads; each channel here has taps of its own.
        if (int64_t const own = call.tensor("weight").dims[0]; own != layer.channels)
            still::fail("CausalConv: weight has taps of ", own, " channels; expected ", layer.channels, ".");
        return layer;
    }

    bool silu_;
};

} // namespace

Entry causal_conv_entry()
{
    return entry_of<Node>("CausalConv");
}

} // namespace still_cpu
