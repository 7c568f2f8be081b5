// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "linear_attention.h"

namespace still_cpu::linear
{

// Tokens of a chunk. What a token costs beside its three products with the state grows with them; the state is read once a chunk.
constexpr int kChunk = 32;
// Calls of fewer new tokens go token by token.
constexpr int kLeastChunked = 4;

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int head;
    int64_t count; // of new tokens
    float* room;
};

struct Kernels
{
    // Floats that `Task::room` must have.
    size_t (*room)(Layer const& layer);
    // All new tokens of the task's row, for its head.
    void (*run)(Task const& task);
};

STILL_KERNEL_SETS

} // namespace still_cpu::linear
