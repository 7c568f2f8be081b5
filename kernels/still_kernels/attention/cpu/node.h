// What the nodes of softmax attention share: the call.
#pragma once

#include "cpu/common/kernel.h"
#include "attention.h"

namespace still_cpu::softmax
{

class Node : public StateKernel<Layer>
{
public:
    void compute(HostCall& call) override
    {
        StateSizes<Layer> const sizes = this->sizes(call);
        int64_t const *const past = call.counts(counts_ + 1), *const brought = call.counts(counts_);
        check_rows(op_.spec(), sizes.batch, past, brought, sizes.tokens, sizes.layer.rows);
        Tensors x{};
        x.query = call.input(0), x.key = call.input(1), x.value = call.input(2);
        x.output = call.output(0, sizes.output);
        x.tokens = sizes.tokens;
        read_tensors(call, x);
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(scratch_size(sizes.layer, sizes.batch, past, brought));
        attention(sizes.layer, x, sizes.batch, past, brought, scratch, call.host, call.instruction_set);
    }

protected:
    // counts: Place of new_tokens, behind which the past length is.
    Node(still::Op const& op, bool half, size_t counts, std::initializer_list<char const*> inputs)
        : StateKernel(op, half, inputs), counts_(counts)
    {
    }

    // The caches, and which blocks are chosen.
    virtual void read_tensors(HostCall& call, Tensors& x) const = 0;

    // All but the cache.
    Layer read_layer(still::Call const& call) const override
    {
        check_heads(call);
        constexpr int64_t most = std::numeric_limits<int32_t>::max();
        return {dimension(call, "H"), dimension(call, "HK"), dimension(call, "D"), dimension(call, "N", 0, most), half_, Cache::kAlike};
    }

    size_t const counts_;
};

} // namespace still_cpu::softmax
