// still::LinearAttention: from a call's shapes to the layer that the kernels know.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "linear_attention.h"

#include <cmath>

namespace still_cpu
{
namespace
{

using linear::Layer;

// Places of the inputs.
enum Input
{
    kQuery,
    kKey,
    kValue,
    kGate,
    kBeta,
    kNewTokens,
    kPastState
};

// The rules, as the OpSpec lists them.
enum Rule
{
    kLinear,
    kGated,
    kDelta,
    kGatedDelta
};

class Node : public StateKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : StateKernel(op, half, {"query", "key", "value", "decay", "beta", "new_tokens", "past_recurrent_state"}),
          rule_(choice(op, "update_rule")), scale_(static_cast<float>(op.attributes().at("scale").real))
    {
    }

    void compute(HostCall& call) override
    {
        StateSizes<Layer> const sizes = this->sizes(call);
        int64_t const* const brought = call.counts(kNewTokens);
        check_rows(op_.spec(), sizes.batch, nullptr, brought, sizes.tokens);
        linear::Tensors x{};
        x.query = call.input(kQuery), x.key = call.input(kKey), x.value = call.input(kValue);
        x.decay = static_cast<float const*>(call.input(kGate)), x.beta = static_cast<float const*>(call.input(kBeta));
        if (!x.decay != !sizes.layer.decay || !x.beta != !sizes.layer.betas)
            still::fail("LinearAttention: the rule needs decay or beta and does not have it, or has one that it does not take.");
        x.output = call.output(0, sizes.output);
        x.state = static_cast<float*>(call.state(kPastState));
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(linear::scratch_size(sizes.layer, sizes.batch));
        linear::attention(sizes.layer, x, sizes.batch, brought, scratch, call.host, call.instruction_set);
    }

private:
    Layer read_layer(still::Call const& call) const override
    {
        Layer layer{dimension(call, "HQ"), dimension(call, "G"), dimension(call, "HK"), dimension(call, "D"), dimension(call, "H"),
            dimension(call, "V"), 0, 0, scale_, half_};
        for (char const* heads : {"HQ", "HK"})
            if (call.size("H") % call.size(heads))
                still::fail("LinearAttention: ", call.size(heads), " heads ", heads, " do not divide the ", call.size("H"), " of value.");
        if (rule_ == kGated || rule_ == kGatedDelta)
            layer.decay = width(call, "E", "D");
        if (rule_ == kDelta || rule_ == kGatedDelta)
            layer.betas = width(call, "W", "H");
        if (layer.scale == 0)
            layer.scale = 1 / std::sqrt(static_cast<float>(layer.dim));
        return layer;
    }

    // 1, or the size of `full`.
    static int width(still::Call const& call, char const* symbol, char const* full)
    {
        if (!call.knows(symbol))
            still::fail("LinearAttention: the rule needs the input that has dimension ", symbol, ".");
        int const found = dimension(call, symbol);
        if (found != 1 && found != dimension(call, full))
            still::fail("LinearAttention: dimension ", symbol, "=", found, "; expected 1 or ", call.size(full), ".");
        return found;
    }

    int rule_;
    float scale_;
};

} // namespace

Entry linear_attention_entry()
{
    return entry_of<Node>("LinearAttention");
}

} // namespace still_cpu
