// A causal convolution of each channel, on the CPU. Knows no host: a host gives tensors, scratch memory and a way to run tasks at once.
//
// A task is a few vectors of channels of one sequence: their latest tokens and taps are copied side by side, then every token is a sum over
// the taps. Past columns are read before they are written, by the one task that has the channels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::convolution
{

struct Layer
{
    int channels; // C
    int taps;     // K
    bool silu;
    bool half; // everything is float16
};

// Data of a call; shapes as in the OpSpec, `void` points to float or to float16. The state is read and written; bias may be null.
struct Tensors
{
    void const* input;
    void const* weight;
    void const* bias;
    void* output;
    void* state;
    int64_t tokens; // T
};

// Run the call. `brought` are the rows' new tokens; output and state are complete afterwards.
void convolve(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, Host& host);

// What is compiled once per instruction set, as a table of functions, and what it works with:

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
