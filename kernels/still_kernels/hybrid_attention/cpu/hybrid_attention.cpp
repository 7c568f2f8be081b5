#include "hybrid_attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/common/scratch.h"
#include "selection.h"

namespace still_cpu::hybrid
{
namespace
{

// A call, and its current pieces.
struct Call
{
    Layer const& layer;
    Tensors const& tensors;
    Kernels const& kernels;
    Host& host;
    int batch;
    Piece* pieces = nullptr; // participating rows
    int count = 0;
    int most_tasks = 0; // of one head of one sequence, blocks or parts
    // Scratch.
    Rooms rooms{};
    size_t lanes = 0;
    float* partials = nullptr;
    int parts = 0;
    uint8_t* leaving = nullptr;  // [B, HS, C]
    uint8_t* previous = nullptr; // [B, HS, C]
    int64_t* done = nullptr;     // processed tokens, [B]
    int* folded = nullptr;       // [B, HS]
    char* folded_keys = nullptr; // [B, HS, k, D]
    char* folded_values = nullptr;
    float* folded_scales = nullptr; // of both
    float* ranked = nullptr; // [B, HS, C]

    size_t selection(Piece const& s, int head) const
    {
        return static_cast<size_t>(s.row) * static_cast<size_t>(layer.select_heads()) + static_cast<size_t>(head);
    }
    // Bytes of the folded keys of one selection head.
    size_t block_bytes() const
    {
        return static_cast<size_t>(layer.salient) * static_cast<size_t>(layer.dim) * static_cast<size_t>(layer.kept_size());
    }
    // Location of folded keys and values of one selection head.
    Kept folded_rows(char* rows, size_t own, bool values) const
    {
        size_t const scales = (own * 2 + (values ? 1 : 0)) * static_cast<size_t>(layer.salient);
        return {rows + own * block_bytes(), folded_scales + scales};
    }

    Task task(Piece const& s, int head, size_t lane) const
    {
        size_t const own = selection(s, head / (layer.heads / layer.select_heads())), chunk = static_cast<size_t>(layer.chunk);
        return {&layer, &tensors, &s, head, leaving + own * chunk, layer.sliding && layer.salient ? previous + own * chunk : nullptr,
            {folded_rows(folded_keys, own, false), folded_rows(folded_values, own, true), folded[own]}, rooms.of(lane)};
    }
};

constexpr int64_t kFewTokens = 8; // of a sequence in a call: up to this many give the bits of calls of one token

int part_count(Piece const& s)
{
    return static_cast<int>(std::max<int64_t>(1, (s.held + kPartSlots - 1) / kPartSlots));
}

// Whether the piece is a step's only token, which has its own kernel.
bool single(Layer const& l, Piece const& s)
{
    return s.count == 1 && !l.sliding;
}

// Runs fn(call, index, lane) for index < total.
template <typename Function>
void spread(Call& call, size_t total, Function fn)
{
    still_cpu::spread(call.host, call.lanes, total, [&](size_t index, size_t lane) { fn(call, index, lane); });
}

void select(Call& call, size_t index, size_t)
{
    Layer const& l = call.layer;
    size_t const heads = static_cast<size_t>(l.select_heads());
    Piece const& s = call.pieces[index / heads];
    int const head = static_cast<int>(index % heads);
    size_t const own = call.selection(s, head), chunk = static_cast<size_t>(l.chunk);
    Selection const selection{&l, &call.tensors, s.row, head, call.ranked + own * chunk};
    call.folded[own] = 0;
    if (s.promotes)
    {
        select_tokens(selection, s.chunk - 2, call.leaving + own * chunk);
        call.folded[own] = fill_cache(selection, s.chunk - 2, call.leaving + own * chunk, call.folded_rows(call.folded_keys, own, false),
            call.folded_rows(call.folded_values, own, true));
    }
    if (l.sliding && l.salient && s.chunk > 0)
        select_tokens(selection, s.chunk - 1, call.previous + own * chunk);
}

void promote(Call& call, size_t index, size_t lane)
{
    size_t const heads = static_cast<size_t>(call.layer.heads);
    Piece const& s = call.pieces[index / heads];
    if (s.promotes)
        call.kernels.promote(call.task(s, static_cast<int>(index % heads), lane));
}

void write_ring(Call& call, size_t index, size_t)
{
    Layer const& l = call.layer;
    size_t const heads = static_cast<size_t>(l.kv_heads), bytes = static_cast<size_t>(l.dim * l.element_size());
    Piece const& s = call.pieces[index / heads];
    size_t const head = index % heads;
    size_t const slot = (static_cast<size_t>(s.row) * heads + head) * static_cast<size_t>(2 * l.chunk)
                        + static_cast<size_t>(s.chunk % 2 * l.chunk + s.offset);
    size_t const token = (static_cast<size_t>(s.row * call.tensors.tokens + s.token)) * heads + head;
    for (auto [ring, fresh] :
        {std::pair(call.tensors.window_key, call.tensors.key), std::pair(call.tensors.window_value, call.tensors.value)})
        for (size_t i = 0; i < static_cast<size_t>(s.count); ++i)
        {
            char const* const from = static_cast<char const*>(fresh) + (token + i * heads) * bytes;
            if (call.kernels.keep)
                call.kernels.keep(from, l.dim, ring, static_cast<int64_t>(slot + i));
            else
                std::memcpy(static_cast<char*>(ring.rows) + (slot + i) * bytes, from, bytes);
        }
}

void attend(Call& call, size_t index, size_t lane)
{
    Layer const& l = call.layer;
    size_t const units = static_cast<size_t>(call.most_tasks), heads = static_cast<size_t>(l.heads);
    Piece const& s = call.pieces[index / units / heads];
    int const head = static_cast<int>(index / units % heads), unit = static_cast<int>(index % units);
    if (single(l, s))
    {
        int const parts = part_count(s);
        if (unit < parts)
            call.kernels.attend_part(call.task(s, head, lane), unit, parts,
                call.partials
                    + (static_cast<size_t>(s.row) * heads + static_cast<size_t>(head)) * static_cast<size_t>(call.parts) * partial_size(l));
    }
    else if (unit * kBlockRows < s.count)
        call.kernels.attend(call.task(s, head, lane), unit * kBlockRows, std::min(kBlockRows, s.count - unit * kBlockRows));
}

void combine(Call& call, size_t index, size_t lane)
{
    size_t const heads = static_cast<size_t>(call.layer.heads);
    Piece const& s = call.pieces[index / heads];
    int const parts = part_count(s);
    if (single(call.layer, s) && parts > 1)
        call.kernels.combine(call.task(s, static_cast<int>(index % heads), lane), parts,
            call.partials
                + (static_cast<size_t>(s.row) * heads + index % heads) * static_cast<size_t>(call.parts) * partial_size(call.layer));
}

// Plans the next step of every sequence; false if all sequences are complete.
bool next_step(Call& call, int64_t const* past, int64_t const* brought)
{
    int64_t* const done = call.done;
    Layer const& l = call.layer;
    call.count = 0;
    call.most_tasks = 0;
    for (int row = 0; row < call.batch; ++row)
    {
        int64_t const left = brought[row] - done[row], position = past[row] + done[row];
        if (left <= 0)
            continue;
        Piece s{};
        s.row = row;
        s.chunk = position / l.chunk;
        s.offset = static_cast<int>(position % l.chunk);
        s.token = done[row];
        s.count = brought[row] <= kFewTokens ? 1 : static_cast<int>(std::min<int64_t>(left, l.chunk - s.offset));
        s.promotes = s.offset == 0 && s.chunk >= 2;
        s.held = std::min<int64_t>(l.slots, l.salient * std::max<int64_t>(0, s.chunk - 1));
        done[row] += s.count;
        call.most_tasks = std::max(call.most_tasks, single(l, s) ? part_count(s) : (s.count + kBlockRows - 1) / kBlockRows);
        call.pieces[call.count++] = s;
    }
    return call.count > 0;
}

void run_step(Call& call)
{
    Layer const& l = call.layer;
    size_t const rows = static_cast<size_t>(call.count), heads = static_cast<size_t>(l.heads);
    bool promotes = false, split = false, alone = true;
    for (int i = 0; i < call.count; ++i)
    {
        Piece const& s = call.pieces[i];
        promotes |= s.promotes;
        split |= single(l, s) && part_count(s) > 1;
        alone &= s.count == 1;
    }
    if (promotes || (l.sliding && l.salient))
        spread(call, rows * static_cast<size_t>(l.select_heads()), select);
    if (promotes)
        spread(call, rows * heads, promote);
    // From here the leaving chunk's slots belong to the new chunk.
    size_t const rings = rows * static_cast<size_t>(l.kv_heads);
    if (alone)
        for (size_t i = 0; i < rings; ++i)
            write_ring(call, i, 0);
    else
        spread(call, rings, write_ring);
    spread(call, rows * heads * static_cast<size_t>(call.most_tasks), attend);
    if (split)
        spread(call, rows * heads, combine);
}

void lay_out(Call& call, Scratch& scratch, int64_t tokens)
{
    Layer const& l = call.layer;
    size_t const batch = static_cast<size_t>(call.batch), heads = static_cast<size_t>(l.heads);
    size_t const selections = batch * static_cast<size_t>(l.select_heads()), chunk = static_cast<size_t>(l.chunk);
    size_t const blocks = static_cast<size_t>((std::min<int64_t>(tokens, l.chunk) + kBlockRows - 1) / kBlockRows);
    call.parts = static_cast<int>(std::max<int64_t>(1, (l.slots + kPartSlots - 1) / kPartSlots));
    call.lanes = std::min(kMaxLanes, batch * heads * std::max<size_t>(blocks, static_cast<size_t>(call.parts)));
    call.done = scratch.take<int64_t>(batch);
    call.pieces = scratch.take<Piece>(batch);
    call.rooms = scratch.take_rooms(call.lanes, call.kernels.room(l));
    call.partials = scratch.take<float>(call.parts > 1 ? batch * heads * static_cast<size_t>(call.parts) * partial_size(l) : 0);
    call.leaving = scratch.take<uint8_t>(selections * chunk);
    call.previous = scratch.take<uint8_t>(selections * chunk);
    call.folded = scratch.take<int>(selections);
    call.folded_keys = scratch.take<char>(selections * call.block_bytes());
    call.folded_values = scratch.take<char>(selections * call.block_bytes());
    call.folded_scales = scratch.take<float>(l.cache == Cache::kCodes ? selections * 2 * static_cast<size_t>(l.salient) : 0);
    call.ranked = scratch.take<float>(selections * chunk);
}

} // namespace

void hybrid_attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host)
{
    Call call{layer, tensors, kernels_of(host.instruction_set, numbers(layer.half, layer.cache)), host, batch};
    int64_t const longest = batch ? *std::max_element(brought, brought + batch) : 0;
    Scratch const scratch(host, [&](Scratch& from) { lay_out(call, from, longest); });
    std::fill(call.done, call.done + batch, 0);
    std::memset(call.folded, 0, sizeof(int) * static_cast<size_t>(batch) * static_cast<size_t>(layer.select_heads()));
    while (next_step(call, past, brought))
        run_step(call);
    size_t const token = static_cast<size_t>(layer.heads) * static_cast<size_t>(layer.dim) * static_cast<size_t>(layer.element_size());
    clear_ends(tensors.output, batch, tensors.tokens, brought, token);
}

} // namespace still_cpu::hybrid
