// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "select_blocks.h"

namespace still_cpu::select
{

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
