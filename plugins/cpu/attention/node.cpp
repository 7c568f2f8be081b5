// still::Attention: from a call's shapes to the layer that the kernels know.
#include "../../core/error.h"
#include "../common/kernel.h"
#include "attention.h"

#include <limits>

namespace still_cpu
{
namespace
{

using softmax::Layer;

// Places of the inputs.
enum Input
{
    kQuery,
    kKey,
    kValue,
    kNewTokens,
    kPastLength,
    kPastKey,
    kPastValue,
    kPastKeyScale,
    kPastValueScale
};

struct Sizes
{
    Layer layer;
    int batch;
    int64_t tokens;
    still::Tensor output;
};

Sizes read_sizes(still::Call const& call, bool half)
{
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    check_heads(call);
    Layer const layer{
        dimension(call, "H"), dimension(call, "HK"), dimension(call, "D"), dimension(call, "N", 0, most), half, cache_of(call, half)};
    return {layer, dimension(call, "B", 0, most), call.size("T"), call.tensor("output")};
}

class Node : public Kernel
{
public:
    Node(still::Op const& op, bool half) : op_(op), half_(half)
    {
        expect_inputs(op.spec(), {"query", "key", "value", "new_tokens", "past_length", "past_key", "past_value", "past_key_scale",
                                     "past_value_scale"});
    }

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [&](still::Call const& bound) { return read_sizes(bound, half_); });
        int64_t const *const past = call.counts(kPastLength), *const brought = call.counts(kNewTokens);
        for (int row = 0; row < sizes.batch; ++row)
        {
            check_counts(op_.spec(), row, past[row], brought[row], sizes.tokens);
            if (past[row] + brought[row] > sizes.layer.rows)
                still::fail("Attention: sequence ", row, " grows to ", past[row] + brought[row], " tokens; the state has room for ",
                    sizes.layer.rows, ". Give a larger state.");
        }
        softmax::Tensors x{};
        x.query = call.input(kQuery), x.key = call.input(kKey), x.value = call.input(kValue);
        x.output = call.output(0, sizes.output);
        x.key_cache = call.kept(kPastKey, kPastKeyScale), x.value_cache = call.kept(kPastValue, kPastValueScale);
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(softmax::scratch_size(sizes.layer, sizes.batch, past, brought));
        softmax::attention(sizes.layer, x, sizes.batch, past, brought, scratch, call.host, call.instruction_set);
    }

private:
    still::Op const& op_;
    bool half_;
    Remembered<Sizes> sizes_;
};

} // namespace

Entry attention_entry()
{
    return {"Attention", [](still::Op const& op, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(op, half); }};
}

} // namespace still_cpu
