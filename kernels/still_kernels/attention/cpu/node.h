// The node of softmax attention: converts a call's shapes to the kernels' layer.
#pragma once

#include "cpu/common/kernel.h"
#include "attention.h"

namespace still_cpu::softmax
{

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : LayerKernel(op, half), block_size_(op.attributes().count("block_size") ? integer(op, "block_size", 1) : 0)
    {
    }

private:
    Layer read_layer(still::Call const& call) const override
    {
        check_heads(call);
        constexpr int64_t most = std::numeric_limits<int32_t>::max();
        Layer layer{dimension(call, "H"), dimension(call, "HK"), dimension(call, "D"), dimension(call, "N", 0, most), half_,
            cache_of(call, half_)};
        if (block_size_)
            layer.block_size = block_size_, layer.slots = dimension(call, "S");
        return layer;
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        int64_t const *const past = call.counts("past_length"), *const brought = call.counts("new_tokens");
        check_rows(op_.spec(), sizes.batch, past, brought, sizes.tokens, sizes.layer.rows);
        Tensors const x{call.input("query"), call.input("key"), call.input("value"), output, call.kept("past_key"), call.kept("past_value"),
            sizes.tokens, block_size_ ? call.input<int32_t>("blocks") : nullptr};
        attention(sizes.layer, x, sizes.batch, past, brought, call);
    }

    int block_size_; // of chosen blocks; 0: tokens read all keys
};

} // namespace still_cpu::softmax
