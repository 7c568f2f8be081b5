// One layer that chooses blocks of keys, on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to run parallel
// tasks.
//
// First the sums of the new keys are written, in place. Then one GEMM multiplies a few tokens of a key/value head with all complete sums;
// the products with means of both kinds are sums of its rows.
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
    // Number of blocks that a token with `own` earlier blocks may choose by score, from `first` on.
    STILL_INLINE int64_t open(int64_t own) const { return own - local > first ? own - local - first : 0; }
    // Number of them that it chooses.
    STILL_INLINE int64_t taken(int64_t own) const
    {
        int64_t const most = top - (own + 1 - open(own));
        return most < open(own) ? most : open(own);
    }
    // Whether a token at `position` reads all blocks, in a call that ends before `end`.
    STILL_INLINE bool reads_all(int64_t position, int64_t end) const { return (by_call ? end : position + 1) < dense; }
    // Whether scores decide which blocks it reads.
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

// Runs the call. `past` and `brought` are the rows' lengths and new tokens; blocks and sums are complete afterwards.
// The result depends neither on the host's threads, nor on the order of tasks, nor, unless `by_call`, on how a sequence is split into
// calls.
void select_blocks(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host);

// Compiled once per instruction set as a table of functions, with their data types:

constexpr int kColumns = 32; // tokens times heads of a group that are scored at once, unless one token has more

// New tokens of one sequence for one key/value head.
struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int head;
    int64_t token;    // first one, among the sequence's new tokens
    int count;        // of tokens
    int64_t position; // of the first one
    float* room;      // of the task's thread
};

struct Kernels
{
    // Floats required in `Task::room` for a longest sequence of `tokens` tokens.
    size_t (*room)(Layer const& layer, int64_t tokens);
    // Adds the task's keys to their sums.
    void (*add)(Task const& task);
    // Scores of the blocks before each token's own, [count, pitch], in the room.
    float const* (*score)(Task const& task, int64_t& pitch);
};

// Tokens of a full task.
STILL_INLINE int64_t task_tokens(Layer const& layer)
{
    return layer.group() < kColumns ? kColumns / layer.group() : 1;
}

STILL_KERNEL_SETS

} // namespace still_cpu::select
