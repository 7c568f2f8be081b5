// Which tokens of a chunk stay in softmax, and what becomes of a full cache. Scores and indices only; no vectors needed.
#pragma once

#include "hybrid_attention.h"

namespace still_cpu::hybrid
{

// What one selection head of one sequence works with.
struct Selection
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int head;      // of the salient cache
    float* ranked; // room for C scores
};

// Marks the k tokens of `chunk` that score highest, in `salient` [C]; of equals the earlier one wins.
void select_tokens(Selection const& selection, int64_t chunk, uint8_t* salient);

// Puts the marked tokens of `chunk`, which must lie in the ring, into the cache. Where it is full the oldest cached tokens are copied to
// folded_keys and folded_values [k, D]; a cache without slots takes the marks away. Returns the number of folded tokens.
int fill_cache(Selection const& selection, int64_t chunk, uint8_t* salient, Kept const& folded_keys, Kept const& folded_values);

} // namespace still_cpu::hybrid
