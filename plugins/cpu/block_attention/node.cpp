// still::BlockAttention: from a call's shapes to the layer of softmax attention, whose tokens see chosen blocks.
#include "../../core/error.h"
#include "../attention/attention.h"
#include "../common/kernel.h"

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
    kBlocks,
    kNewTokens,
    kPastLength,
    kPastKey,
    kPastValue
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
    Node(still::Op const& op, bool half) : op_(op), half_(half), block_size_(integer(op, "block_size", 1))
    {
        expect_inputs(op.spec(), {"query", "key", "value", "blocks", "new_tokens", "past_length", "past_key", "past_value"});
    }

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [&](still::Call const& bound) { return read_sizes(bound); });
        int64_t const *const past = call.counts(kPastLength), *const brought = call.counts(kNewTokens);
        for (int row = 0; row < sizes.batch; ++row)
        {
            check_counts(op_.spec(), row, past[row], brought[row], sizes.tokens);
            if (past[row] + brought[row] > sizes.layer.rows)
                still::fail("BlockAttention: sequence ", row, " grows to ", past[row] + brought[row],
                    " tokens; the state has room for ", sizes.layer.rows, ". Give a larger state.");
        }
        softmax::Tensors x{};
        x.query = call.input(kQuery), x.key = call.input(kKey), x.value = call.input(kValue);
        x.output = call.output(0, sizes.output);
        x.key_cache = {call.state(kPastKey)}, x.value_cache = {call.state(kPastValue)};
        x.tokens = sizes.tokens;
        x.blocks = static_cast<int32_t const*>(call.input(kBlocks));
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(softmax::scratch_size(sizes.layer, sizes.batch, past, brought));
        softmax::attention(sizes.layer, x, sizes.batch, past, brought, scratch, call.host, call.instruction_set);
    }

private:
    Sizes read_sizes(still::Call const& call) const
    {
        constexpr int64_t most = std::numeric_limits<int32_t>::max();
        check_heads(call);
        Cache const cache = !half_ && call.kept == still::Type::kFloat16 ? Cache::kHalf : Cache::kAlike;
        Layer const layer{dimension(call, "H"), dimension(call, "HK"), dimension(call, "D"), dimension(call, "N", 0, most), half_,
            cache, block_size_, dimension(call, "S")};
        return {layer, dimension(call, "B", 0, most), call.size("T"), call.tensor("output")};
    }

    still::Op const& op_;
    bool half_;
    int block_size_;
    Remembered<Sizes> sizes_;
};

} // namespace

Entry block_attention_entry()
{
    return {"BlockAttention", [](still::Op const& op, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(op, half); }};
}

} // namespace still_cpu
