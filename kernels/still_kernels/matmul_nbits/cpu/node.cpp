// still::MatMulNBits: converts a call's shapes to the kernels' layer.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "matmul_nbits.h"

namespace still_cpu
{
namespace
{

using low_bit::Layer;

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : LayerKernel(op, half), bits_(integer(op, "bits", 1)), block_(integer(op, "block_size", 1)), zero_(integer(op, "zero_code", -1)),
          super_block_(integer(op, "super_block", 0))
    {
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

private:
    Layer read_layer(still::Call const& call) const override
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
        return layer;
    }

    Layer read_super_blocks(still::Call const& call) const
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
        return layer;
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        low_bit::Tensors const x{call.input("input"), call.input<uint8_t>("blocks"), call.input("scales"),
            call.input<uint8_t>("zero_points"), call.input("offsets"), output, sizes.all};
        low_bit::multiply(sizes.layer, x, call);
    }

    static constexpr int64_t super = 256;
    int bits_;
    int block_;
    int zero_;
    int super_block_;
};

} // namespace

Entry matmul_nbits_entry()
{
    return entry_of<Node>("MatMulNBits");
}

} // namespace still_cpu
