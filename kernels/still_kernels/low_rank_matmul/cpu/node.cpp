// still::LowRankMatMul: from a call's shapes to the layer that the kernels know.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "low_rank_matmul.h"

namespace still_cpu
{
namespace
{

struct Sizes
{
    low_rank::Layer layer;
    int64_t tokens;
    still::Tensor output;
};

class Node : public Kernel
{
public:
    Node(still::Op const& op, bool half) : op_(op), half_(half) { expect_inputs(op.spec(), {"input", "inner", "outer", "base"}); }

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [&](still::Call const& bound) { return read_sizes(bound); });
        void* const output = call.output(0, sizes.output);
        low_rank::Tensors const x{call.input(0), call.input(1), call.input(2), call.input(3), output, sizes.tokens}; // by the OpSpec
        if (sizes.tokens == 0)
            return;
        void* const scratch = call.scratch(low_rank::scratch_size(sizes.layer, sizes.tokens, call.instruction_set));
        low_rank::multiply(sizes.layer, x, scratch, call.host, call.instruction_set);
    }

private:
    Sizes read_sizes(still::Call const& call) const
    {
        constexpr int64_t most = 1 << 24;
        low_rank::Layer const layer{dimension(call, "I", 1, most), dimension(call, "R"), dimension(call, "O", 1, most), half_};
        // Weights of other ops may have a dimension of 1 for all heads.
        if (int64_t const own = call.tensor("inner").dims[0]; own != layer.inputs)
            still::fail("LowRankMatMul: inner has ", own, " inputs; expected ", layer.inputs, ".");
        if (int64_t const own = call.tensor("outer").dims[0]; own != layer.rank)
            still::fail("LowRankMatMul: outer has a rank of ", own, "; expected ", layer.rank, ".");
        return {layer, call.size("tokens"), call.tensor("output")};
    }

    still::Op const& op_;
    bool half_;
    Remembered<Sizes> sizes_;
};

} // namespace

Entry low_rank_matmul_entry()
{
    return {"LowRankMatMul", [](still::Op const& op, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(op, half); }};
}

} // namespace still_cpu
