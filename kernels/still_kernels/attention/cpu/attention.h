// One layer of causal softmax attention with a cache, on the CPU. Knows no host: a host gives tensors, scratch memory and a way to run
// tasks at once.
//
// New keys and values go to their rows of the cache, in place. Then blocks of new tokens attend to what is filled: all query heads of a
// key/value head are columns of one GEMM, so the cache is read once for them and never expanded. Where blocks are few, their keys
// are cut into parts, and whoever finishes the last part of a block merges them.
//
// Where tokens have chosen blocks of keys (still::BlockAttention), those that any token of a block reads are gone through one after the
// other, and hidden from the tokens that do not read them; keys of no token's blocks are not read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::softmax
{

struct Layer
{
    int heads;    // H
    int kv_heads; // HK
    int dim;      // D
    int64_t rows; // N
    bool half;    // everything is float16
    Cache cache;
    int block_size = 0; // keys of a chosen block
    int slots = 0;      // blocks that a token may choose; 0: tokens see all keys up to their own

    STILL_INLINE int group() const { return heads / kv_heads; }
    STILL_INLINE int element_size() const { return half ? 2 : 4; }
};

// Data of a call; shapes as in the OpSpec, `void` points to float or to float16. The cache is read and written.
struct Tensors
{
    void const* query;
    void const* key;
    void const* value;
    void* output;
    Kept key_cache;
    Kept value_cache;
    int64_t tokens; // T
    int32_t const* blocks = nullptr; // [B, T, HK, slots], none twice; below 0: none
};

// Bytes of scratch for a call; no alignment needed.
size_t scratch_size(Layer const& layer, int batch, int64_t const* past, int64_t const* brought);

// Run the call. `past` and `brought` are the rows' lengths and new tokens; output and cache are complete afterwards.
// The result depends on neither the host's threads nor the order of tasks.
void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, void* scratch,
    Host const& host, int instruction_set);

} // namespace still_cpu::softmax
