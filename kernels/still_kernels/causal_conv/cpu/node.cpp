// still::CausalConv: converts a call's shapes to the kernels' layer.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "cpu/common/scratch.h"
#include "causal_conv.h"

#include <algorithm>

namespace still_cpu
{
namespace convolution
{

void convolve(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, Host& host)
{
    Kernels const& kernels = kernels_of(host.instruction_set, numbers(layer.half));
    auto const blocks = static_cast<size_t>((layer.channels + kBlock - 1) / kBlock); // of channels
    size_t const tasks = static_cast<size_t>(batch) * blocks, lanes = std::min(kMaxLanes, tasks);
    Rooms rooms;
    Scratch const scratch(host, [&](Scratch& from) { rooms = from.take_rooms(lanes, room(layer)); });
    auto const run = [&](size_t index, size_t lane)
    {
        int const row = static_cast<int>(index / blocks), block = static_cast<int>(index % blocks);
        kernels.run({&layer, &tensors, row, block * kBlock, brought[row], rooms.of(lane)});
    };
    // A step is too short for threads.
    spread(host, tensors.tokens > 8 ? lanes : 1, tasks, run);
    size_t const token = static_cast<size_t>(layer.channels) * (layer.half ? 2 : 4);
    clear_ends(tensors.output, batch, tensors.tokens, brought, token);
}

} // namespace convolution

namespace
{

using convolution::Layer;

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half) : LayerKernel(op, half), silu_(choice(op, "activation") == 1) {}

private:
    Layer read_layer(still::Call const& call) const override
    {
        Layer const layer{dimension(call, "C", 1, 1 << 24), dimension(call, "K", 2, 256), silu_, half_};
        if (call.size("P") != layer.taps - 1)
            still::fail("CausalConv: ", layer.taps, " taps with ", call.size("P"), " columns of state; expected one less.");
        // Weights of other ops may have a dimension of 1 for all heads; here each channel has its own taps.
        if (int64_t const own = call.tensor("weight").dims[0]; own != layer.channels)
            still::fail("CausalConv: weight has taps of ", own, " channels; expected ", layer.channels, ".");
        return layer;
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        int64_t const* const brought = call.counts("new_tokens");
        check_rows(op_.spec(), sizes.batch, nullptr, brought, sizes.tokens);
        convolution::Tensors const x{call.input("input"), call.input("weight"), call.input("bias"), output, call.state("past_conv_state"),
            sizes.tokens};
        convolution::convolve(sizes.layer, x, sizes.batch, brought, call);
    }

    bool silu_;
};

} // namespace

Entry causal_conv_entry()
{
    return entry_of<Node>("CausalConv");
}

} // namespace still_cpu
