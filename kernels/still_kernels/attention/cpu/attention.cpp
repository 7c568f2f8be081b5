#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "cpu/common/scratch.h"

namespace still_cpu::softmax
{
namespace
{

constexpr int64_t kWantedTasks = 64; // blocks are split by keys if there are fewer tasks: enough for this many threads
constexpr int64_t kLeastKeys = 256;  // of a part
constexpr int64_t kFewTokens = 8;    // a call of up to this many tokens gives the bits of calls of one token:
constexpr int64_t kFewKeys = 512;    // its parts do not depend on lengths
// Columns of a block whose tokens have chosen keys: more columns share reads and mask more of them.
constexpr int64_t kChosenColumns = 32;

// How a call is split. It depends only on shapes and counts, so the number of threads changes no bit.
struct Cut
{
    int64_t blocks = 0;    // of the row with most new tokens, per head
    int64_t tokens = 0;    // of a block
    int64_t part_keys = 1; // a multiple of a tile's keys
    int64_t parts = 1;     // of the longest row
    int64_t units = 0;     // blocks of all rows and heads

    Cut(Layer const& l, int batch, int64_t const* past, int64_t const* brought)
    {
        int64_t most = 0, longest = 0;
        for (int row = 0; row < batch; ++row)
        {
            most = std::max(most, brought[row]);
            longest = std::max(longest, brought[row] ? past[row] + brought[row] : 0);
        }
        tokens = std::max<int64_t>(1, std::min(most, block_tokens(l)));
        if (l.slots)
        {
            longest = static_cast<int64_t>(l.slots) * l.block_size;
            tokens = most <= kFewTokens ? 1 : std::min(tokens, std::max<int64_t>(1, kChosenColumns / l.group()));
        }
        blocks = (most + tokens - 1) / tokens;
        units = batch * l.kv_heads * blocks;
        if (units == 0)
            return;
        int64_t const wanted = (kWantedTasks + units - 1) / units;
        part_keys = (std::max(kLeastKeys, (longest + wanted - 1) / wanted) + kTileKeys - 1) / kTileKeys * kTileKeys;
        if (most <= kFewTokens)
            part_keys = kFewKeys;
        if (l.slots) // parts consist of one token's blocks
            part_keys = tokens == 1 && most <= kFewTokens ? (kFewKeys + l.block_size - 1) / l.block_size * l.block_size : longest;
        parts = (longest + part_keys - 1) / part_keys;
    }
};

struct Call
{
    Layer const& layer;
    Tensors const& tensors;
    Kernels const& kernels;
    Cut cut;
    size_t lanes = 0;
    Rooms rooms{};
    float* partials = nullptr;
    std::atomic<int>* left = nullptr; // unfinished parts of each unit

    void lay_out(Scratch& scratch)
    {
        size_t const units = static_cast<size_t>(cut.units), parts = static_cast<size_t>(cut.parts);
        lanes = std::min(kMaxLanes, units * parts);
        rooms = scratch.take_rooms(lanes, kernels.room(layer));
        partials = scratch.take<float>(parts > 1 ? units * parts * static_cast<size_t>(partial_size(layer, cut.tokens)) : 0);
        left = scratch.take<std::atomic<int>>(parts > 1 ? units : 0);
    }
};

// Writes the new keys and values of one sequence and head after the cached ones.
void append(Layer const& l, Tensors const& x, Kernels const& kernels, int row, int head, int64_t past, int64_t brought)
{
    size_t const dim = static_cast<size_t>(l.dim), bytes = dim * static_cast<size_t>(l.element_size());
    auto const write = [&](Kept const& cache, void const* fresh, int64_t target, size_t source)
    {
        char const* const from_row = static_cast<char const*>(fresh) + source;
        if (kernels.keep)
            kernels.keep(from_row, l.dim, cache, target);
        else
            std::memcpy(static_cast<char*>(cache.rows) + static_cast<size_t>(target) * bytes, from_row, bytes);
    };
    int64_t const to = (static_cast<int64_t>(row) * l.kv_heads + head) * l.rows + past, from = row * x.tokens * l.kv_heads + head;
    for (int64_t i = 0; i < brought; ++i)
    {
        size_t const source = static_cast<size_t>(from + i * l.kv_heads) * bytes;
        write(x.key_cache, x.key, to + i, source);
        write(x.value_cache, x.value, to + i, source);
    }
}

// One part of one block; the last part to finish merges all.
void attend(Call& call, int64_t const* past, int64_t const* brought, size_t index, size_t lane)
{
    Layer const& l = call.layer;
    Cut const& cut = call.cut;
    int64_t const unit = static_cast<int64_t>(index) / cut.parts, part = static_cast<int64_t>(index) % cut.parts;
    // The last blocks read most keys. They come first, so that no thread runs one alone at the end.
    int64_t const place = cut.blocks - 1 - unit / (cut.units / cut.blocks), of_block = unit % (cut.units / cut.blocks);
    int const row = static_cast<int>(of_block / l.kv_heads), head = static_cast<int>(of_block % l.kv_heads);
    int64_t const token = place * cut.tokens, count = std::min(cut.tokens, brought[row] - token);
    if (count <= 0)
        return;
    int64_t seen = past[row] + token + count;
    if (l.slots)
    {
        // All slots of a block of several tokens are one part.
        int32_t const* const chosen = call.tensors.blocks + ((row * call.tensors.tokens + token) * l.kv_heads + head) * l.slots;
        int used = l.slots;
        while (used > 1 && chosen[used - 1] < 0)
            --used;
        seen = static_cast<int64_t>(used) * l.block_size;
    }
    int64_t const parts = (seen + cut.part_keys - 1) / cut.part_keys;
    if (part >= parts)
        return;
    Block const block{row, head, token, static_cast<int>(count), past[row] + token};
    Task const task{&l, &call.tensors, block, call.rooms.of(lane)};
    int64_t const from = part * cut.part_keys, to = l.slots ? from + cut.part_keys : std::min(seen, from + cut.part_keys);
    if (parts == 1)
        return call.kernels.attend(task, from, to, nullptr);
    size_t const size = static_cast<size_t>(partial_size(l, count));
    float* const partials = call.partials
                            + static_cast<size_t>(unit) * static_cast<size_t>(cut.parts)
                                  * static_cast<size_t>(partial_size(l, cut.tokens));
    call.kernels.attend(task, from, to, partials + static_cast<size_t>(part) * size);
    if (call.left[unit].fetch_add(1, std::memory_order_acq_rel) + 1 == parts)
        call.kernels.combine(task, static_cast<int>(parts), partials);
}

} // namespace

void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host)
{
    Call call{layer, tensors, kernels_of(host.instruction_set, numbers(layer.half, layer.cache)), Cut(layer, batch, past, brought)};
    Scratch const scratch(host, [&](Scratch& from) { call.lay_out(from); });
    if (call.cut.parts > 1)
        for (int64_t unit = 0; unit < call.cut.units; ++unit)
            new (call.left + unit) std::atomic<int>(0);
    size_t const heads = static_cast<size_t>(layer.kv_heads);
    auto const write = [&](size_t index, size_t)
    {
        size_t const row = index / heads;
        append(layer, tensors, call.kernels, static_cast<int>(row), static_cast<int>(index % heads), past[row], brought[row]);
    };
    // The rows of a step are too few for threads.
    spread(host, tensors.tokens > 8 ? kMaxLanes : 1, static_cast<size_t>(batch) * heads, write);
    if (call.cut.units)
        spread(host, call.lanes, static_cast<size_t>(call.cut.units * call.cut.parts),
            [&](size_t index, size_t lane) { attend(call, past, brought, index, lane); });
    size_t const token = static_cast<size_t>(layer.heads) * static_cast<size_t>(layer.dim) * static_cast<size_t>(layer.element_size());
    clear_ends(tensors.output, batch, tensors.tokens, brought, token);
}

} // namespace still_cpu::softmax
