// Tokens times a weight of 4 or 8 bits in blocks, on the CPU. Knows no host: a host gives tensors, scratch memory and a way to run tasks.
//
// The weight is read where it lies, row by row, and never copied. Tokens are rounded to 8 bits in blocks of 32, so that products are sums
// of whole numbers, which are scaled block by block. A token's sums are made in one order, whatever else the call has: a call of several
// tokens gives bit for bit what a call of each gives. Forms without such kernels are computed over the weight as float32 numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::low_bit
{

struct Layer
{
    int64_t outputs; // O
    int64_t inputs;  // I
    int block;       // inputs that share a scale
    int bits;        // 4 or 8
    int zero;        // the code of 0 where there are no zero points
    int64_t zero_bytes; // of an output's zero points
    bool half;        // activations are float16
    bool half_scales; // scales and offsets are
    int super_block;  // inputs whose scales are whole numbers times one; 0: scales are numbers

    int64_t blocks() const { return inputs / block; }
    // Of blocks; with super-blocks their scales are among them.
    int64_t row_bytes() const { return inputs * bits / 8 + (super_block ? inputs / super_block * 16 : 0); }
    // Whether tokens are rounded to 8 bits: float32 beside super-blocks, or blocks of 32 or a power of two times that.
    bool rounded() const { return super_block || (!half && block >= 32 && (block & (block - 1)) == 0); }
};

// Data of a call; shapes as in the OpSpec. Zero points and offsets may be null.
struct Tensors
{
    void const* input; // [tokens, I]
    uint8_t const* blocks;
    void const* scales;
    uint8_t const* zero_points;
    void const* offsets;
    void* output;   // [tokens, O]
    int64_t tokens; // of all sequences
};

void multiply(Layer const& layer, Tensors const& tensors, Host& host);

// What is compiled once per instruction set, as a table of functions, and what it works with:

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

// `kernels_of` for those that multiply: the ones for AVX-512 are of AVX-512 VNNI.
Kernels const& kernels_for(int set, bool half);

STILL_INLINE int64_t up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

} // namespace still_cpu::low_bit
