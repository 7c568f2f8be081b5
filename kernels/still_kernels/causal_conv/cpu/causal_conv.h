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

// Bytes of scratch for a call; no alignment needed.
size_t scratch_size(Layer const& layer, int batch);

// Run the call. `brought` are the rows' new tokens; output and state are complete afterwards.
void convolve(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, void* scratch, Host const& host,
    int instruction_set);

} // namespace still_cpu::convolution
