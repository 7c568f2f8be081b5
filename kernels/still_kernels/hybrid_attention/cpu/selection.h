// Selection of a chunk's salient tokens, and handling of a full cache. Only scores and indices, no vectors.
#pragma once

#include <algorithm>
#include <cstring>

#include "hybrid_attention.h"

namespace still_cpu::hybrid
{

// Data of one selection head of one sequence.
struct Selection
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int head;      // of the salient cache
    float* ranked; // room for C scores
};

// Score of each token of a chunk as the selection ranks it.
inline void rank(Selection const& selection, int64_t chunk, float* ranked)
{
    Layer const& l = *selection.layer;
    int const group = l.heads / l.select_heads(), slot = static_cast<int>(chunk % 2) * l.chunk;
    int64_t const first = static_cast<int64_t>(selection.row) * l.heads + selection.head * group;
    for (int i = 0; i < l.chunk; ++i)
    {
        float const* const score = selection.tensors->window_score + first * 2 * l.chunk + slot + i;
        float value = score[0];
        for (int g = 1; g < group; ++g)
        {
            float const other = score[static_cast<int64_t>(g) * 2 * l.chunk];
            value = l.scope == Scope::kGroupMax ? std::max(value, other) : value + other;
        }
        ranked[i] = l.scope == Scope::kGroupMean ? value / static_cast<float>(group) : value;
    }
}

// Marks the k tokens of `chunk` with the highest scores in `salient` [C]; the earlier one first if equal.
inline void select_tokens(Selection const& selection, int64_t chunk, uint8_t* salient)
{
    Layer const& l = *selection.layer;
    float* const ranked = selection.ranked;
    rank(selection, chunk, ranked);
    std::memset(salient, 0, static_cast<size_t>(l.chunk));
    for (int taken = 0; taken < l.salient; ++taken)
    {
        int best = -1;
        for (int i = 0; i < l.chunk; ++i)
            if (!salient[i] && (best < 0 || ranked[i] > ranked[best]))
                best = i;
        salient[best] = 1;
    }
}

// Copies row `from` of one state to row `to` of another, without conversion.
inline void copy_row(Kept const& source, int64_t from, Kept const& target, int64_t to, size_t bytes)
{
    std::memcpy(static_cast<char*>(target.rows) + static_cast<size_t>(to) * bytes,
        static_cast<char const*>(source.rows) + static_cast<size_t>(from) * bytes, bytes);
    if (source.scales)
        target.scales[to] = source.scales[from];
}

// Copies the marked tokens of `chunk`, which must be in the ring, to the cache. If it is full the oldest cached tokens are first copied to
// folded_keys and folded_values [k, D]; a cache without slots clears the marks. Returns the number of folded tokens.
inline int fill_cache(Selection const& selection, int64_t chunk, uint8_t* salient, Kept const& folded_keys, Kept const& folded_values)
{
    Layer const& l = *selection.layer;
    Tensors const& x = *selection.tensors;
    int64_t const slots = l.slots, head = static_cast<int64_t>(selection.row) * l.select_heads() + selection.head;
    size_t const bytes = static_cast<size_t>(l.dim) * static_cast<size_t>(l.kept_size());
    if (!slots)
    {
        std::memset(salient, 0, static_cast<size_t>(l.chunk));
        return 0;
    }
    // Chunks use groups of k slots in rotation; the chunk that occupies them leaves.
    int64_t slot = head * slots + chunk * l.salient % slots;
    int64_t const head_of_group = selection.head / (l.select_heads() / l.kv_heads);
    int64_t const ring_slot = ((static_cast<int64_t>(selection.row) * l.kv_heads + head_of_group) * 2 + chunk % 2) * l.chunk;
    int const folded = chunk * l.salient >= slots ? l.salient : 0;
    for (int i = 0; i < folded; ++i)
    {
        copy_row(x.salient_key, slot + i, folded_keys, i, bytes);
        copy_row(x.salient_value, slot + i, folded_values, i, bytes);
    }
    for (int i = 0; i < l.chunk; ++i)
        if (salient[i])
        {
            copy_row(x.window_key, ring_slot + i, x.salient_key, slot, bytes);
            copy_row(x.window_value, ring_slot + i, x.salient_value, slot++, bytes);
        }
    return folded;
}

} // namespace still_cpu::hybrid
