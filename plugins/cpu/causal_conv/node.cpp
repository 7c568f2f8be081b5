// still::CausalConv: from a call's shapes to the layer that the kernels know.
#include "../../core/error.h"
#include "../common/kernel.h"
#include "causal_conv.h"

#include <limits>

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

struct Sizes
{
    Layer layer;
    int batch;
    int64_t tokens;
    still::Tensor output;
};

class Node : public Kernel
{
public:
    Node(still::Op const& op, bool half) : op_(op), half_(half), silu_(choice(op, "activation") == 1)
    {
        expect_inputs(op.spec(), {"input", "weight", "bias", "new_tokens", "past_conv_state"});
    }

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [&](still::Call const& bound) { return read_sizes(bound); });
        int64_t const* const brought = call.counts(kNewTokens);
        for (int row = 0; row < sizes.batch; ++row)
            check_counts(op_.spec(), row, 0, brought[row], sizes.tokens);
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
    Sizes read_sizes(still::Call const& call) const
    {
        constexpr int64_t most = std::numeric_limits<int32_t>::max();
        Layer const layer{dimension(call, "C", 1, 1 << 24), dimension(call, "K", 2, 256), silu_, half_};
        if (call.size("P") != layer.taps - 1)
            still::fail("CausalConv: ", layer.taps, " taps with ", call.size("P"), " columns of state; expected one less.");
        // Weights of other ops may have a dimension of 1 for all heads; each channel here has taps of its own.
        if (int64_t const own = call.tensor("weight").dims[0]; own != layer.channels)
            still::fail("CausalConv: weight has taps of ", own, " channels; expected ", layer.channels, ".");
        return {layer, dimension(call, "B", 0, most), call.size("T"), call.tensor("output")};
    }

    still::Op const& op_;
    bool half_;
    bool silu_;
    Remembered<Sizes> sizes_;
};

} // namespace

Entry causal_conv_entry()
{
    return {"CausalConv", [](still::Op const& op, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(op, half); }};
}

} // namespace still_cpu
