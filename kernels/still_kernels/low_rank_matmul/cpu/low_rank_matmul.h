// Tokens times two thin matrices, added to a base, on CPUs. Independent of hosts.
//
// A token's sums have a fixed order: a call of several tokens gives the bits of one call for each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::low_rank
{

struct Layer
{
    int inputs;  // I
    int rank;    // R
    int outputs; // O
    bool half;   // everything is float16
};

// Data of a call; shapes as in the OpSpec, `void` points to float or to float16. The base may be null.
struct Tensors
{
    void const* input;
    void const* inner;
    void const* outer;
    void const* base;
    void* output;
    int64_t tokens; // of all sequences
};

// Compiled once per instruction set as a table of functions, with their data types:

constexpr int kTokens = 16; // of a task

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    int64_t token; // first one
    int count;
    float* room;
};

struct Kernels
{
    size_t (*room)(Layer const& layer); // floats of a task
    void (*multiply)(Task const& task);
};

STILL_KERNEL_SETS

} // namespace still_cpu::low_rank
