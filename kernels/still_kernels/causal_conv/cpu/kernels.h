// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "causal_conv.h"

namespace still_cpu::convolution
{

constexpr int kBlock = 64;      // channels of a task
constexpr int kTileTokens = 64; // that are copied at once

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int channel;   // first one
    int64_t count; // of new tokens
    float* room;
};

struct Kernels
{
    // All new tokens of the task's row, for its channels.
    void (*run)(Task const& task);
};

// Floats that `Task::room` must have: taps, bias, tokens with the past ones before them.
STILL_INLINE size_t room(Layer const& layer)
{
    return static_cast<size_t>(kBlock) * static_cast<size_t>(2 * layer.taps + kTileTokens + 2);
}

STILL_KERNEL_SETS

} // namespace still_cpu::convolution
