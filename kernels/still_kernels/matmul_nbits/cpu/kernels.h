// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "matmul_nbits.h"

namespace still_cpu::low_bit
{

constexpr int kUnit = 32;   // inputs that are rounded with one factor
constexpr int kRows = 4;    // outputs that are computed at once
constexpr int kTile = 8;    // outputs that lie in one another, where scales are whole numbers
constexpr int kChunk = 64;  // tokens whose numbers of kSuper inputs, 16 KB, stay in a processor's first cache
constexpr int kSuper = 256; // inputs whose scales share a number
constexpr int64_t kTokens = 512; // that are rounded at once

// Tokens in 8 bits, and for each unit, four times side by side: what a code stands for, and the sum of the codes in that. Beside tiles
// codes are in order, with one factor a unit and one sum a block, and those of kSuper inputs of kChunk tokens lie side by side.
struct Rounded
{
    int8_t* codes;
    float* factors;
    float* sums;
    int64_t first, tokens; // beside tiles: the task's first token among those that are rounded at once, and how many those are
    int64_t units; // of a token, filled up to whole steps with zeros
};

// Units of a token of `inputs`: an odd number of steps, as tokens whose distance is a power of two fall into few sets of the first cache.
inline int64_t units_of(int64_t inputs, int step)
{
    return ((inputs / kUnit + step - 1) / step | 1) * step;
}

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    Rounded const* rounded;
    int64_t token, tokens; // first one of the call, and how many
    int64_t row, rows;     // outputs: a multiple of kRows or kTile, but for the last ones
    float* room;           // of `exact`: I floats for the weight, I for a token
};

struct Kernels
{
    int step; // units at once
    void (*round)(Task const& task);
    void (*multiply)(Task const& task);
    void (*exact)(Task const& task);
};

STILL_KERNEL_SETS

} // namespace still_cpu::low_bit
