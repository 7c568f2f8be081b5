// A causal convolution of each channel, on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to run parallel
// tasks.
//
// A task processes a few vectors of channels of one sequence. It copies their latest tokens and taps to contiguous memory; every token is
// then a sum over the taps. The same task reads past columns before it writes them.
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

// Runs the call. `brought` are the rows' new tokens; output and state are complete afterwards.
void convolve(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, Host& host);

// Compiled once per instruction set as a table of functions, with their data types:

constexpr int kBlock = 64;      // channels of a task
constexpr int kTileTokens = 64; // copied at once

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

// Floats required in `Task::room`: taps, bias, tokens after the past ones.
STILL_INLINE size_t room(Layer const& layer)
{
    return static_cast<size_t>(kBlock) * static_cast<size_t>(2 * layer.taps + kTileTokens + 2);
}

STILL_KERNEL_SETS

} // namespace still_cpu::convolution
