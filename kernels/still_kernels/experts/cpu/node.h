// The node of experts: converts a call's shapes to the kernels' layer.
#pragma once

#include "core/error.h"
#include "cpu/common/kernel.h"
#include "experts.h"

namespace still_cpu::experts
{

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half) : LayerKernel(op, half), gated_(choice(op, "activation") == 0)
    {
        if (!op.attributes().count("bits"))
            return;
        bits_ = integer(op, "bits", 1), block_ = integer(op, "block_size", 1);
        if (bits_ != 4 && bits_ != 8)
            still::fail(op.spec().name, ": bits=", bits_, "; the kernels have 4 and 8.");
    }

private:
    static constexpr int64_t kMostSize = 1 << 24;

    // Inputs of a matrix, and the form of its blocks.
    low_bit::Layer read_matrix(still::Call const& call, std::string const& matrix, std::string const& inputs) const
    {
        constexpr int64_t word = 32;
        low_bit::Layer layer{};
        if (!bits_)
        {
            layer.inputs = dimension(call, inputs.c_str(), 1, kMostSize);
            return layer;
        }
        layer.inputs = call.size(inputs + "S") * block_, layer.block = block_, layer.bits = bits_;
        layer.zero = 1 << (bits_ - 1), layer.half = half_, layer.half_scales = half_;
        int64_t const words = call.size(inputs + "W"), columns = layer.blocks();
        if (layer.inputs < 1 || layer.inputs > kMostSize || words * word != layer.inputs * bits_)
            still::fail(op_.spec().name, ": ", matrix, " has ", words, " words and ", columns, " scales a row; with ", bits_,
                " bits in blocks of ", block_, " these do not match.");
        if (call.has(matrix + "_zero_points"))
        {
            int64_t const zeros = call.size(inputs + "Z");
            if (zeros != (columns * bits_ + word - 1) / word)
                still::fail(op_.spec().name, ": ", matrix, "_zero_points have ", zeros, " words for ", columns, " blocks of ", bits_,
                    " bits.");
            layer.zero_bytes = 4 * zeros;
        }
        return layer;
    }

    Layer read_layer(still::Call const& call) const override
    {
        char const* const name = op_.spec().name.c_str();
        Layer layer{};
        layer.gate_up = read_matrix(call, "gate_up", "I"), layer.down = read_matrix(call, "down", "M");
        if (int64_t const channels = call.size("I"); layer.gate_up.inputs != channels)
            still::fail(name, ": gate_up is of ", layer.gate_up.inputs, " inputs; expected I=", channels, ".");
        layer.experts = dimension(call, "E"), layer.chosen = dimension(call, "K"), layer.half = half_, layer.gated = gated_;
        layer.gate_up.outputs = dimension(call, "R", 1, kMostSize), layer.down.outputs = layer.gate_up.inputs;
        if (int64_t const rows = layer.inner() * (gated_ ? 2 : 1); layer.gate_up.outputs != rows)
            still::fail(name, ": gate_up has ", layer.gate_up.outputs, " rows for M=", layer.inner(), " channels; expected ", rows, ".");
        // Weights of other ops may have a dimension of 1 for all heads.
        for (char const* const matrix : {"gate_up", "down"})
            if (int64_t const own = call.tensor(matrix).dims[0]; own != layer.experts)
                still::fail(name, ": ", matrix, " is of ", own, " experts; expected ", layer.experts, ".");
        return layer;
    }

    Matrix matrix_of(HostCall& call, std::string const& name) const
    {
        void const* const values = call.input(name.c_str());
        if (!bits_)
            return {values, nullptr, nullptr};
        return {values, call.input((name + "_scales").c_str()), call.input<uint8_t>((name + "_zero_points").c_str())};
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        mix(sizes.layer,
            {call.input("input"), call.input<int32_t>("expert"), call.input<float>("weight"), matrix_of(call, "gate_up"),
                matrix_of(call, "down"), output, sizes.all},
            call);
    }

    bool gated_;
    int bits_ = 0; // of a number in blocks; 0: numbers of the activations' type
    int block_ = 0;
};

} // namespace still_cpu::experts
