#include "select_blocks.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "cpu/common/scratch.h"

namespace still_cpu::select
{
namespace
{

constexpr size_t kLanes = 16; // most tasks with a room at once: a room grows with the context

// The chosen blocks of a token with `own` blocks before its own, ascending, then -1.
void choose(Layer const& l, int64_t own, bool dense, float const* scores, uint64_t* candidates, int32_t* to)
{
    int32_t* const end = to + l.slots;
    int64_t const open = dense ? 0 : l.open(own), taken = dense ? 0 : l.taken(own);
    for (int64_t b = 0; b < (open ? l.first : own + 1); ++b)
        *to++ = static_cast<int32_t>(b);
    if (open)
    {
        // Weights are not negative, so their bits have their order; of equal ones the lower index is the larger number.
        for (int64_t i = 0; i < open; ++i)
        {
            uint32_t bits = 0;
            if (scores)
                std::memcpy(&bits, scores + l.first + i, sizeof bits);
            candidates[i] = static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(l.first + i));
        }
        if (taken > 0 && taken < open)
            std::nth_element(candidates, candidates + taken, candidates + open, std::greater<uint64_t>());
        int32_t* const from = to;
        for (int64_t i = 0; i < taken; ++i)
            *to++ = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(candidates[i]));
        std::sort(from, to);
        for (int64_t b = own - l.local; b <= own; ++b)
            *to++ = static_cast<int32_t>(b);
    }
    std::fill(to, end, -1);
}

} // namespace

void select_blocks(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host)
{
    Kernels const& kernels = kernels_of(host.instruction_set, numbers(layer.half));
    int64_t most = 0, longest = 0;
    for (int row = 0; row < batch; ++row)
    {
        most = std::max(most, brought[row]);
        longest = std::max(longest, brought[row] ? past[row] + brought[row] : 0);
    }
    int64_t const tokens = task_tokens(layer), tasks = (most + tokens - 1) / tokens * batch * layer.kv_heads;
    size_t const lanes = std::min(kLanes, static_cast<size_t>(tasks)), of_lane = static_cast<size_t>(longest / layer.block + 1);
    Rooms rooms;
    uint64_t* candidates = nullptr;
    Scratch const scratch(host, [&](Scratch& from)
        {
            rooms = from.take_rooms(lanes, kernels.room(layer, longest));
            candidates = from.take<uint64_t>(lanes * of_lane);
        });
    int64_t const of_row = static_cast<int64_t>(layer.kv_heads) * layer.slots;
    std::fill(tensors.blocks, tensors.blocks + batch * tensors.tokens * of_row, -1);
    size_t const heads = static_cast<size_t>(layer.kv_heads), all = static_cast<size_t>(batch) * heads;
    auto const add = [&](size_t index, size_t)
    {
        int const row = static_cast<int>(index / heads), head = static_cast<int>(index % heads);
        kernels.add({&layer, &tensors, row, head, 0, static_cast<int>(brought[row]), past[row], nullptr});
    };
    // The keys of a step are too few for threads.
    spread(host, tensors.tokens > 8 ? kMaxLanes : 1, all, add);
    auto const run = [&](size_t index, size_t lane)
    {
        int const row = static_cast<int>(index % all / heads), head = static_cast<int>(index % heads);
        // The last tokens have most blocks to score, so they come first.
        int64_t const token = (tasks / static_cast<int64_t>(all) - 1 - static_cast<int64_t>(index / all)) * tokens;
        int64_t const count = std::min(tokens, brought[row] - token);
        if (count <= 0)
            return;
        Task const task{&layer, &tensors, row, head, token, static_cast<int>(count), past[row] + token, rooms.of(lane)};
        int64_t pitch = 0;
        int64_t const end = past[row] + brought[row];
        bool const scored = layer.scored(task.position + count - 1, end);
        float const* const scores = scored ? kernels.score(task, pitch) : nullptr;
        for (int64_t i = 0; i < count; ++i)
        {
            int64_t const position = task.position + i;
            choose(layer, position / layer.block, layer.reads_all(position, end), scores ? scores + i * pitch : nullptr,
                candidates + lane * of_lane,
                tensors.blocks + (row * tensors.tokens + token + i) * of_row + static_cast<int64_t>(head) * layer.slots);
        }
    };
    spread(host, lanes, static_cast<size_t>(tasks), run);
}

} // namespace still_cpu::select
