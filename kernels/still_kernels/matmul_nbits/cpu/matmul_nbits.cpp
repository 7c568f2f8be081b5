#include "matmul_nbits.h"

#include <algorithm>

#include "cpu/common/scratch.h"

namespace still_cpu::low_bit
{
namespace
{

constexpr size_t kLanes = 16;               // most useful threads
constexpr int64_t kLeastBytes = 16 << 10;   // of the weight, below which a task costs less than waking a thread
constexpr int64_t kMostBytes = 128 << 10;   // of the weight, to stay in a processor's cache for all tokens
constexpr int64_t kSerialNumbers = 8 << 10; // of tokens, below which they are rounded without threads

// Layout of a call's scratch memory.
struct Parts
{
    Rounded rounded{}, rest{};
    Rooms rooms;

    void lay_out(Layer const& layer, int64_t tokens, Kernels const& kernels, Scratch& scratch)
    {
        for (Rounded* each : {&rounded, &rest})
            if (layer.super_block)
            {
                auto const inputs = static_cast<size_t>(layer.inputs * std::min(tokens, kTokens));
                each->codes = scratch.take<int8_t>(inputs);
                each->factors = scratch.take<float>(inputs / kUnit);
                each->sums = scratch.take<float>(inputs / static_cast<size_t>(layer.block));
                each->outliers = scratch.take<uint8_t>(inputs / kSuper);
            }
            else if (layer.rounded())
            {
                each->units = units_of(layer.inputs, kernels.step);
                auto const units = static_cast<size_t>(each->units * std::min(tokens, kTokens));
                each->codes = scratch.take<int8_t>(units * kUnit);
                each->factors = scratch.take<float>(units * kRows);
                each->sums = scratch.take<float>(units * kRows);
            }
        int64_t const marks = units_of(layer.inputs, kernels.step) * static_cast<int64_t>(sizeof(Marks) / sizeof(float));
        rooms = scratch.take_rooms(kLanes, static_cast<size_t>(layer.rounded() ? marks : 2 * up(layer.inputs, 16)));
    }
};

// Outputs of a task: enough tasks for every thread, and weights that fit into a cache.
int64_t rows_of_task(Layer const& layer, int64_t tokens)
{
    int64_t const even = up(layer.outputs, static_cast<int64_t>(kLanes)) / static_cast<int64_t>(kLanes);
    int64_t const least = kLeastBytes / layer.row_bytes() / tokens, most = std::max<int64_t>(kMostBytes / layer.row_bytes(), 1);
    return up(std::min(std::max(even, least), most), 2 * kTile);
}

} // namespace

Kernels const& kernels_for(int set, bool half)
{
#if defined(STILL_X86)
    if (instruction_set(set) == InstructionSet::v4 && !__builtin_cpu_supports("avx512vnni"))
        ++set;
#endif
    return kernels_of(set, numbers(half));
}

void multiply(Layer const& layer, Tensors const& tensors, Host& host)
{
    if (tensors.tokens == 0 || layer.outputs == 0)
        return;
    Kernels const& kernels = kernels_for(host.instruction_set, layer.half);
    Parts parts;
    Scratch const scratch(host, [&](Scratch& from) { parts.lay_out(layer, tensors.tokens, kernels, from); });
    int64_t const rows = rows_of_task(layer, std::min(tensors.tokens, kTokens));
    auto const tasks = static_cast<size_t>(up(layer.outputs, rows) / rows);
    for (int64_t token = 0; token < tensors.tokens; token += kTokens)
    {
        int64_t const count = std::min(tensors.tokens - token, kTokens);
        parts.rounded.tokens = parts.rest.tokens = count;
        parts.rounded.rest = &parts.rest;
        if (layer.rounded())
        {
            auto const round = [&](int64_t first, int64_t tokens)
            {
                Rounded here = parts.rounded, rest = parts.rest;
                here.rest = &rest;
                for (Rounded* each : {&here, &rest})
                {
                    each->first = first;
                    if (!layer.super_block)
                    {
                        each->codes += first * each->units * kUnit;
                        each->factors += first * each->units * kRows, each->sums += first * each->units * kRows;
                    }
                }
                kernels.round({&layer, &tensors, &here, token + first, tokens, 0, 0, nullptr});
            };
            int64_t const alone = std::max<int64_t>(kSerialNumbers / layer.inputs, 1);
            if (count <= alone)
                round(0, count);
            else
                spread(host, kLanes, static_cast<size_t>(up(count, alone) / alone),
                    [&](size_t i, size_t)
                    {
                        int64_t const first = static_cast<int64_t>(i) * alone;
                        round(first, std::min(alone, count - first));
                    });
        }
        auto const multiply_rows = [&](size_t i, size_t lane)
        {
            int64_t const row = static_cast<int64_t>(i) * rows;
            Task const task{&layer, &tensors, &parts.rounded, token, count, row, std::min(rows, layer.outputs - row),
                parts.rooms.of(lane)};
            (layer.rounded() ? kernels.multiply : kernels.exact)(task);
        };
        spread(host, kLanes, tasks, multiply_rows);
    }
}

} // namespace still_cpu::low_bit
