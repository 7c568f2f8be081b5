// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "attention.h"

namespace still_cpu::softmax
{

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
