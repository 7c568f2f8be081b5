// still::ExpertsNBits: from a call's shapes to the layer that the kernels of ../experts know.
#include "../../experts/cpu/node.h"

#include <string>

namespace still_cpu
{
namespace
{

class Node : public experts::Node
{
public:
    Node(still::Op const& op, bool half) : experts::Node(op, half), bits_(integer(op, "bits", 1)), block_(integer(op, "block_size", 1))
    {
        expect_inputs(op.spec(), {"input", "expert", "weight", "gate_up", "gate_up_scales", "gate_up_zero_points", "down", "down_scales",
                                     "down_zero_points"});
        if (bits_ != 4 && bits_ != 8)
            still::fail("ExpertsNBits: bits=", bits_, "; the kernels have 4 and 8.");
    }

private:
    low_bit::Layer read_matrix(still::Call const& call, char const* matrix, std::string const& inputs) const
    {
        constexpr int64_t word = 32;
        low_bit::Layer layer{};
        layer.inputs = call.size((inputs + "S").c_str()) * block_, layer.block = block_, layer.bits = bits_;
        layer.zero = 1 << (bits_ - 1), layer.half = half_, layer.half_scales = half_;
        int64_t const words = call.size((inputs + "W").c_str()), columns = layer.blocks();
        if (layer.inputs < 1 || layer.inputs > kMostSize || words * word != layer.inputs * bits_)
            still::fail("ExpertsNBits: ", matrix, " has ", words, " words and ", columns, " scales a row; of ", bits_,
                " bits in blocks of ", block_, " they do not go together.");
        if (call.has((matrix + std::string("_zero_points")).c_str()))
        {
            int64_t const zeros = call.size((inputs + "Z").c_str());
            if (zeros != (columns * bits_ + word - 1) / word)
                still::fail("ExpertsNBits: ", matrix, "_zero_points have ", zeros, " words for ", columns, " blocks of ", bits_, " bits.");
            layer.zero_bytes = 4 * zeros;
        }
        return layer;
    }

    experts::Layer read_layer(still::Call const& call) const override
    {
        experts::Layer layer{};
        layer.gate_up = read_matrix(call, "gate_up", "I"), layer.down = read_matrix(call, "down", "M");
        if (int64_t const channels = call.size("I"); layer.gate_up.inputs != channels)
            still::fail("ExpertsNBits: gate_up is of ", layer.gate_up.inputs, " inputs; expected I=", channels, ".");
        return layer;
    }

    void read_matrices(HostCall& call, experts::Tensors& x) const override
    {
        auto const matrix = [&](size_t first) -> experts::Matrix
        { return {call.input(first), call.input(first + 1), static_cast<uint8_t const*>(call.input(first + 2))}; };
        x.gate_up = matrix(3), x.down = matrix(6);
    }

    int bits_;
    int block_;
};

} // namespace

Entry experts_nbits_entry()
{
    return entry_of<Node>("ExpertsNBits");
}

} // namespace still_cpu
