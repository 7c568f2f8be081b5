#include "linear_attention.h"

#include <algorithm>
#include <cstring>

#include "cpu/common/denormals.h"
#include "cpu/common/scratch.h"
#include "kernels.h"

namespace still_cpu::linear
{
namespace
{

// Rooms of the tasks that run at once; with a null base only their size counts.
struct Rooms
{
    size_t lanes;
    size_t distance = 0;
    float* first = nullptr;
    size_t size;

    Rooms(Layer const& layer, int batch, Kernels const& kernels, void* base)
        : lanes(std::min(kMaxLanes, static_cast<size_t>(batch) * static_cast<size_t>(layer.heads)))
    {
        Scratch scratch(base);
        first = scratch.take_rooms(lanes, kernels.room(layer), distance);
        size = scratch.used();
    }
};

} // namespace

size_t scratch_size(Layer const& layer, int batch)
{
    return Rooms(layer, batch, kernels_of(0, numbers(layer.half)), nullptr).size + 64;
}

void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, void* scratch, Host const& host,
    int instruction_set)
{
    Kernels const& kernels = kernels_of(instruction_set, numbers(layer.half));
    Rooms const rooms(layer, batch, kernels, scratch);
    size_t const heads = static_cast<size_t>(layer.heads);
    auto const run = [&](size_t index, size_t lane)
    {
        NoDenormals const quick;
        int const row = static_cast<int>(index / heads), head = static_cast<int>(index % heads);
        kernels.run({&layer, &tensors, row, head, brought[row], rooms.first + lane * rooms.distance});
    };
    size_t const tasks = static_cast<size_t>(batch) * heads;
    if (tensors.tokens < kLeastChunked)
        spread_evenly(host, rooms.lanes, tasks, run);
    else
        spread(host, rooms.lanes, tasks, run);
    size_t const element = layer.half ? 2 : 4;
    size_t const token = heads * static_cast<size_t>(layer.shared) * static_cast<size_t>(layer.size) * element;
    for (int row = 0; row < batch; ++row)
        std::memset(static_cast<char*>(tensors.output) + static_cast<size_t>(row * tensors.tokens + brought[row]) * token, 0,
            static_cast<size_t>(tensors.tokens - brought[row]) * token);
    clear(scratch, rooms.size);
}

} // namespace still_cpu::linear
