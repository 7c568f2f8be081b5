// One layer of causal softmax attention with a cache, on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to run
// parallel tasks.
//
// New keys and values are written to their rows of the cache, in place. Then blocks of new tokens attend to the filled rows. All query
// heads of a key/value head are columns of one GEMM, so the cache is read once for them and never expanded. If there are few blocks, their
// keys are split into parts, and the task that finishes the last part of a block merges them.
//
// If tokens have chosen blocks of keys (still::BlockAttention), a task iterates over the blocks that any of its tokens reads and masks them
// for the other tokens. Keys outside of all tokens' blocks are not read.
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
    int slots = 0;      // most chosen blocks of a token; 0: tokens read all keys up to their own

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
    int32_t const* blocks = nullptr; // [B, T, HK, slots], distinct; below 0: none
};

// Runs the call. `past` and `brought` are the rows' lengths and new tokens; output and cache are complete afterwards.
// The result depends neither on the host's threads nor on the order of tasks.
void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host);

// Compiled once per instruction set as a table of functions, with their data types:

// Columns of a block: logits, queries and values of the block fit into the L2 cache with a tile of keys.
constexpr int kBlockColumns = 128;
constexpr int kTileKeys = 128;

// New tokens of one sequence for one key/value head. Column t * G + g is query head g of the group at token t.
struct Block
{
    int row;
    int head;
    int64_t token;    // first one, among the sequence's new tokens
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
    // Floats required in `Task::room`.
    size_t (*room)(Layer const& layer);
    // Attention of the block to keys from .. to - 1. Writes maximum, sum and weighted values to `partial`, or the output if that is null.
    // With chosen blocks, keys are counted in their slots, of block_size each.
    void (*attend)(Task const& task, int64_t from, int64_t to, float* partial);
    // Writes a row of `count` floats; null if the cache has the activations' type.
    void (*keep)(void const* from, int count, Kept const& to, int64_t row);
    // Writes the output from `parts` consecutive partial results; overwrites the first.
    void (*combine)(Task const& task, int parts, float* partials);
};

// Tokens of a full block.
STILL_INLINE int64_t block_tokens(Layer const& layer)
{
    return layer.group() < kBlockColumns ? kBlockColumns / layer.group() : 1;
}

// Columns of a block, padded to the widest vectors of any instruction set.
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
