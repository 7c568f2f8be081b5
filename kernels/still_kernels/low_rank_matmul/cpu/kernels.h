// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "low_rank_matmul.h"

namespace still_cpu::low_rank
{

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
