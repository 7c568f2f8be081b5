// still::MatMulNBits: from a call's shapes to the layer that the kernels know.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "matmul_nbits.h"

namespace still_cpu
{
namespace
{

using low_bit::Layer;

// Places of the inputs.
enum Input
{
    kInput,
    kBlocks,
    kScales,
    kZeroPoints,
    kOffsets
};

struct Sizes
{
    Layer layer;
    int64_t tokens;
    still::Tensor output;
};

class Node : public Kernel
{
public:
    Node(still::Op const& op, bool half) : op_(op), half_(half), bits_(integer(op, "bits", 1)), block_(integer(op, "block_size", 1)),
          zero_(integer(op, "zero_code", -1)), super_block_(integer(op, "super_block", 0))
    {
        expect_inputs(op.spec(), {"input", "blocks", "scales", "zero_points", "offsets"});
        if (super_block_)
        {
            if (super_block_ != super || !((bits_ == 4 && block_ == 32) || (bits_ == 6 && block_ == 16)) || half)
                still::fail("MatMulNBits: super_block=", super_block_, " with bits=", bits_, ", block_size=", block_,
                    half ? " and float16" : "", "; the kernels have super_block=256 with 4 and 32 or 6 and 16, beside float32.");
            return;
        }
        if (bits_ != 4 && bits_ != 8)
            still::fail("MatMulNBits: bits=", bits_, "; the kernels have 4 and 8.");
        if (zero_ >> bits_ > 0)
            still::fail("MatMulNBits: zero_code=", zero_, " is no code of ", bits_, " bits.");
    }

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [&](still::Call const& bound) { return read_sizes(bound); });
        low_bit::Tensors x{};
        x.input = call.input(kInput);
        x.blocks = static_cast<uint8_t const*>(call.input(kBlocks));
        x.scales = call.input(kScales);
        x.zero_points = static_cast<uint8_t const*>(call.input(kZeroPoints));
        x.offsets = call.input(kOffsets);
        x.output = call.output(0, sizes.output);
        x.tokens = sizes.tokens;
        if (sizes.tokens == 0 || sizes.layer.outputs == 0)
            return;
        void* const scratch = call.scratch(low_bit::scratch_size(sizes.layer, sizes.tokens, call.instruction_set));
        low_bit::multiply(sizes.layer, x, scratch, call.host, call.instruction_set);
    }

private:
    Sizes read_sizes(still::Call const& call) const
    {
        constexpr int64_t word = 32;
        if (super_block_)
            return read_super_blocks(call);
        int64_t const inputs = dimension(call, "I", 1, 1 << 24), words = call.size("IW"), columns = call.size("IS");
        if (inputs % block_)
            still::fail("MatMulNBits: block_size=", block_, " does not divide I=", inputs, " inputs.");
        if (words * word != inputs * bits_)
            still::fail("MatMulNBits: blocks have ", words, " words for I=", inputs, " inputs of ", bits_, " bits.");
        if (columns * block_ != inputs)
            still::fail("MatMulNBits: scales are ", columns, " for I=", inputs, " inputs in blocks of ", block_, ".");
        int const zero = zero_ < 0 ? 1 << (bits_ - 1) : zero_;
        bool const half_scales = call.kept == still::Type::kFloat16;
        Layer layer{dimension(call, "O", 0, 1 << 30), inputs, block_, bits_, zero, 0, half_, half_scales, 0};
        // Weights of other ops may have a dimension of 1 for all heads.
        if (int64_t const own = call.tensor("blocks").dims[0]; own != layer.outputs)
            still::fail("MatMulNBits: blocks are of ", own, " outputs; expected ", layer.outputs, ".");
        if (call.has("zero_points"))
        {
            int64_t const zeros = call.size("IZ");
            if (zeros != (columns * bits_ + word - 1) / word)
                still::fail("MatMulNBits: zero_points have ", zeros, " words for ", columns, " blocks of ", bits_, " bits.");
            layer.zero_bytes = 4 * zeros;
        }
        return {layer, call.size("tokens"), call.tensor("output")};
    }

    Sizes read_super_blocks(still::Call const& call) const
    {
        int64_t const outputs = dimension(call, "O", 0, 1 << 30), inputs = dimension(call, "I", 1, 1 << 24);
        int64_t const words = call.size("IW"), columns = call.size("IS"), supers = inputs / super;
        Layer const layer{outputs, inputs, block_, bits_, 0, 0, false, true, super_block_};
        if (inputs % super || outputs % 8 || call.tensor("blocks").dims[0] != outputs)
            still::fail("MatMulNBits: I=", inputs, " inputs and O=", outputs, " outputs with super_block=", super,
                "; expected multiples of 256 and 8, and blocks of as many outputs.");
        if (words * 4 != layer.row_bytes() || columns != supers * (bits_ == 4 ? 2 : 1))
            still::fail("MatMulNBits: blocks have ", words, " words and scales are ", columns, " for I=", inputs, " inputs of ", bits_,
                " bits with super_block=", super, ".");
        if (call.has("zero_points") || call.has("offsets") || call.kept != still::Type::kFloat16)
            still::fail("MatMulNBits: super_block=", super, " goes with scales in float16, without zero_points and offsets.");
        return {layer, call.size("tokens"), call.tensor("output")};
    }

    static constexpr int64_t super = 256;
    still::Op const& op_;
    bool half_;
    int bits_;
    int block_;
    int zero_;
    int super_block_;
    Remembered<Sizes> sizes_;
};

} // namespace

Entry matmul_nbits_entry()
{
    return {"MatMulNBits", [](still::Op const& op, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(op, half); }};
}

} // namespace still_cpu
