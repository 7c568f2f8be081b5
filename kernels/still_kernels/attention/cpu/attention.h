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

// Run the call. `past` and `brought` are the rows' lengths and new tokens; output and cache are complete afterwards.
// The result depends on neither the host's threads nor the order of tasks.
void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host);

// What is compiled once per instruction set, as a table of functions, and what it works with:

// Columns of a block: with logits, queries and values of the block, a tile of keys stays in the second cache.
constexpr int kBlockColumns = 128;
constexpr int kTileKeys = 128;

// New tokens of one sequence for one key/value head. Column t * G + g is query head g of the group at token t.
struct Block
{
    int row;
    int head;
    int64_t token;    // first one, of the sequence's new tokens
    int count;        // of tokens
    int64_t position; // of the first one
};

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    Block block;
    float* room; // of the task's thread
};

struct Kernels
{
    // Floats that `Task::room` must have.
    size_t (*room)(Layer const& layer);
    // Attention of the block to keys from .. to - 1: maximum, sum and weighted values go to `partial`; null: the output is written. Where
    // tokens have chosen blocks, keys are counted in their slots, of block_size each.
    void (*attend)(Task const& task, int64_t from, int64_t to, float* partial);
    // Writes a row of `count` floats; null where the cache is of the activations' type.
    void (*keep)(void const* from, int count, Kept const& to, int64_t row);
    // Writes the output from the `parts` partial results that lie one behind the other; overwrites the first.
    void (*combine)(Task const& task, int parts, float* partials);
};

// Tokens of a full block.
STILL_INLINE int64_t block_tokens(Layer const& layer)
{
    return layer.group() < kBlockColumns ? kBlockColumns / layer.group() : 1;
}

// Columns of a block, as no instruction set has wider vectors.
STILL_INLINE int64_t block_width(Layer const& layer, int64_t tokens)
{
    return (tokens * layer.group() + 15) / 16 * 16;
}

// Floats from one partial result to the next: maximum and sum of each column, then the values [D, columns].
STILL_INLINE int64_t partial_size(Layer const& layer, int64_t tokens)
{
    return (2 + static_cast<int64_t>(layer.dim)) * block_width(layer, tokens);
}

STILL_KERNEL_SETS

} // namespace still_cpu::softmax
