#include "causal_conv.h"

#include <algorithm>
#include <cstring>

#include "cpu/common/scratch.h"
#include "kernels.h"

namespace still_cpu::convolution
{
namespace
{

// Rooms of the tasks that run at once; with a null base only their size counts.
struct Rooms
{
    size_t blocks; // of channels
    size_t lanes;
    size_t distance = 0;
    float* first;
    size_t size;

    Rooms(Layer const& layer, int batch, void* base)
        : blocks(static_cast<size_t>((layer.channels + kBlock - 1) / kBlock)),
          lanes(std::min(kMaxLanes, static_cast<size_t>(batch) * blocks))
    {
        Scratch scratch(base);
        first = scratch.take_rooms(lanes, room(layer), distance);
        size = scratch.used();
    }
};

} // namespace

size_t scratch_size(Layer const& layer, int batch)
{
    return Rooms(layer, batch, nullptr).size + 64;
}

void convolve(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, void* scratch, Host const& host,
    int instruction_set)
{
    Kernels const& kernels = kernels_of(instruction_set, numbers(layer.half));
    Rooms const rooms(layer, batch, scratch);
    auto const run = [&](size_t index, size_t lane)
    {
        int const row = static_cast<int>(index / rooms.blocks), block = static_cast<int>(index % rooms.blocks);
        kernels.run({&layer, &tensors, row, block * kBlock, brought[row], rooms.first + lane * rooms.distance});
    };
    // A step is too little for threads.
    spread(host, tensors.tokens > 8 ? rooms.lanes : 1, static_cast<size_t>(batch) * rooms.blocks, run);
    size_t const token = static_cast<size_t>(layer.channels) * (layer.half ? 2 : 4);
    for (int row = 0; row < batch; ++row)
        std::memset(static_cast<char*>(tensors.output) + static_cast<size_t>(row * tensors.tokens + brought[row]) * token, 0,
            static_cast<size_t>(tensors.tokens - brought[row]) * token);
    clear(scratch, rooms.size);
}

} // namespace still_cpu::convolution
