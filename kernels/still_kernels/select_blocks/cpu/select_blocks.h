// One layer that chooses blocks of keys, on the CPU. Knows no host: a host gives tensors, scratch memory and a way to run tasks at once.
//
// First the sums of the new keys are written, in place. Then a few tokens of a key/value head at a time are multiplied with all sums that
// are complete by one GEMM: the products with means of both kinds are sums of its rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::select
{

struct Layer
{
    int heads;    // H
    int kv_heads; // HK
    int dim;      // D
    int64_t rows; // N
    bool half;    // query and key are float16
    int block, stride, length, lse_stride, lse_length;
    int top, first, local, dense, slots; // top_blocks, init_blocks, local_blocks, dense_length, block_slots
    int by_call;                         // switch_by_call

    STILL_INLINE int group() const { return heads / kv_heads; }
    // Blocks that a token with this many before its own may choose by their scores: `first` and on.
    STILL_INLINE int64_t open(int64_t own) const { return own - local > first ? own - local - first : 0; }
    // Of those, how many it takes.
    STILL_INLINE int64_t taken(int64_t own) const
    {
        int64_t const most = top - (own + 1 - open(own));
        return most < open(own) ? most : open(own);
    }
    // Whether a token at `position` reads all blocks, in a call that ends before `end`.
    STILL_INLINE bool reads_all(int64_t position, int64_t end) const { return (by_call ? end : position + 1) < dense; }
    // Whether scores decide what it reads.
    STILL_INLINE bool scored(int64_t position, int64_t end) const
    {
        int64_t const own = position / block;
        return !reads_all(position, end) && taken(own) > 0 && taken(own) < open(own);
    }
};

// Data of a call; shapes as in the OpSpec, `void` points to float or to float16. The sums are read and written.
struct Tensors
{
    void const* query;
    void const* key;
    int32_t* blocks;
    float* sums;
    int64_t tokens; // T
};

// Run the call. `past` and `brought` are the rows' lengths and new tokens; blocks and sums are complete afterwards.
// The result depends on neither the host's threads nor the order of tasks, nor, unless `by_call`, on how a sequence is cut into calls.
void select_blocks(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host);

// What is compiled once per instruction set, as a table of functions, and what it works with:

constexpr int kColumns = 32; // tokens times heads of a group that are scored at once, unless one token has more

// New tokens of one sequence for one key/value head.
struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int head;
    int64_t token;    // first one, of the sequence's new tokens
    int count;        // of tokens
    int64_t position; // of the first one
    float* room;      // of the task's thread
};

struct Kernels
{
    // Floats that `Task::room` must have where the longest sequence has so many tokens.
    size_t (*room)(Layer const& layer, int64_t tokens);
    // Adds the task's keys to their sums.
    void (*add)(Task const& task);
    // Scores of the blocks before each token's own, [count, pitch]; the scores are in the room.
    float const* (*score)(Task const& task, int64_t& pitch);
};

// Tokens of a full task.
STILL_INLINE int64_t task_tokens(Layer const& layer)
{
    return layer.group() < kColumns ? kColumns / layer.group() : 1;
}

STILL_KERNEL_SETS

} // namespace still_cpu::select
