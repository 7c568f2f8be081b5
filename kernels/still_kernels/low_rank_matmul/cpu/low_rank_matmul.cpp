#include "low_rank_matmul.h"

#include <algorithm>

#include "cpu/common/scratch.h"
#include "kernels.h"

namespace still_cpu::low_rank
{
namespace
{

constexpr size_t kLanes = 16; // threads that there is use for

// The rooms of tasks that run at once; with a null base only their size counts.
struct Rooms
{
    size_t tasks, lanes, distance = 0;
    float* first;
    size_t size;

    Rooms(Layer const& layer, int64_t tokens, Kernels const& kernels, void* base)
        : tasks(static_cast<size_t>((tokens + kTokens - 1) / kTokens)), lanes(std::min(kLanes, tasks))
    {
        Scratch scratch(base);
        first = scratch.take_rooms(lanes, kernels.room(layer), distance);
        size = scratch.used();
    }
};

} // namespace

size_t scratch_size(Layer const& layer, int64_t tokens, int instruction_set)
{
    return Rooms(layer, tokens, kernels_of(instruction_set, numbers(layer.half)), nullptr).size + 64;
}

void multiply(Layer const& layer, Tensors const& tensors, void* scratch, Host const& host, int instruction_set)
{
    Kernels const& kernels = kernels_of(instruction_set, numbers(layer.half));
    Rooms const rooms(layer, tensors.tokens, kernels, scratch);
    spread(host, rooms.lanes, rooms.tasks,
        [&](size_t i, size_t lane)
        {
            int64_t const token = static_cast<int64_t>(i) * kTokens;
            auto const count = static_cast<int>(std::min<int64_t>(kTokens, tensors.tokens - token));
            kernels.multiply({&layer, &tensors, token, count, rooms.first + lane * rooms.distance});
        });
    clear(scratch, rooms.size);
}

} // namespace still_cpu::low_rank
