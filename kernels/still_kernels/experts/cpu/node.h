// What the nodes of experts share: sizes, and the call.
#pragma once

#include "core/error.h"
#include "cpu/common/kernel.h"
#include "experts.h"

namespace still_cpu::experts
{

class Node : public Kernel
{
public:
    Node(still::Op const& op, bool half) : op_(op), half_(half), gated_(choice(op, "activation") == 0) {}

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [&](still::Call const& bound) { return read_sizes(bound); });
        Tensors x{};
        x.input = call.input(0);
        x.expert = static_cast<int32_t const*>(call.input(1));
        x.weight = static_cast<float const*>(call.input(2));
        read_matrices(call, x);
        x.output = call.output(0, sizes.output);
        x.tokens = sizes.tokens;
        if (sizes.tokens == 0)
            return;
        void* const scratch = call.scratch(scratch_size(sizes.layer, sizes.tokens, call.instruction_set));
        mix(sizes.layer, x, scratch, call.host, call.instruction_set);
    }

protected:
    static constexpr int64_t kMostSize = 1 << 24;

    // Inputs of both matrices, and what their blocks are.
    virtual Layer read_layer(still::Call const& call) const = 0;
    virtual void read_matrices(HostCall& call, Tensors& x) const = 0;

    char const* name() const { return op_.spec().name.c_str(); }
    still::Op const& op_;
    bool half_;

private:
    struct Sizes
    {
        Layer layer;
        int64_t tokens;
        still::Tensor output;
    };

    Sizes read_sizes(still::Call const& call) const
    {
        Layer layer = read_layer(call);
        layer.experts = dimension(call, "E"), layer.chosen = dimension(call, "K"), layer.half = half_, layer.gated = gated_;
        layer.gate_up.outputs = dimension(call, "R", 1, kMostSize), layer.down.outputs = layer.gate_up.inputs;
        if (int64_t const rows = layer.inner() * (gated_ ? 2 : 1); layer.gate_up.outputs != rows)
            still::fail(name(), ": gate_up has ", layer.gate_up.outputs, " rows for M=", layer.inner(), " channels; expected ", rows, ".");
        // Weights of other ops may have a dimension of 1 for all heads.
        for (char const* const matrix : {"gate_up", "down"})
            if (int64_t const own = call.tensor(matrix).dims[0]; own != layer.experts)
                still::fail(name(), ": ", matrix, " is of ", own, " experts; expected ", layer.experts, ".");
        return {layer, call.size("tokens"), call.tensor("output")};
    }

    bool gated_;
    Remembered<Sizes> sizes_;
};

} // namespace still_cpu::experts
