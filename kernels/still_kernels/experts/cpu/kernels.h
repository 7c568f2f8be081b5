// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "experts.h"

namespace still_cpu::experts
{

// Rows of one expert's matrix times its tokens.
struct Task
{
    void const* weight; // of numbers, [outputs, inputs]
    int64_t inputs, outputs;
    int64_t row, rows;  // of the outputs
    float const* input; // [tokens, inputs]
    float* output;      // [tokens, outputs]
    int64_t tokens;
};

// Zero points and scales of the rows of a task, what its tokens sum up to in each block [tokens, blocks], and room for kRows * blocks
// numbers.
struct Zeros
{
    low_bit::Layer const* matrix;
    uint8_t const* zero_points;
    float const* scales;
    float const* sums;
    float* room;
};

struct Kernels
{
    void (*widen)(void const* from, int64_t count, float* to);
    void (*multiply)(Task const& task);
    void (*activate)(float const* from, int64_t inner, bool gated, float* to);
    // Takes what codes of 0 stand for from the output of `task`, whose weight is in blocks.
    void (*subtract_zeros)(Task const& task, Zeros const& zeros);
    // Sum over `chosen` rows of `parts` at `places`, each times its weight, in this order.
    void (*combine)(float const* parts, int64_t const* places, float const* weights, int64_t chosen, int64_t channels, float* sum,
        void* output);
};

STILL_KERNEL_SETS

} // namespace still_cpu::experts
