// Tokens times a 4- or 8-bit weight in blocks, on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to run tasks.
//
// The weight is read in place, row by row, and never copied. Tokens are rounded to 8 bits in blocks of 32, so that products are sums
// of integers, which are scaled by block. What rounding leaves of a block with an outlier is rounded again and multiplied in a second pass
// over such blocks: with 8 bits alone SmolLM2 answers in French what it is asked in English. A token's sums have a fixed order: a call of
// several tokens gives the bits of one call for each. Forms without such kernels dequantize the weight to float32.
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
    int zero;        // the code of 0 without zero points
    int64_t zero_bytes; // of an output's zero points
    bool half;        // activations are float16
    bool half_scales; // scales and offsets are
    int super_block;  // inputs whose scales are integers times a number; 0: scales are numbers

    int64_t blocks() const { return inputs / block; }
    // Bytes of blocks; with super-blocks they include scales.
    int64_t row_bytes() const { return inputs * bits / 8 + (super_block ? inputs / super_block * 16 : 0); }
    // Whether tokens are rounded to 8 bits: float32 with super-blocks, or with blocks of 32 times a power of two.
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

// Compiled once per instruction set as a table of functions, with their data types:

constexpr int kUnit = 32;   // inputs that are rounded with one factor
constexpr int kRows = 4;    // outputs that are computed at once
constexpr int kTile = 8;    // interleaved outputs, with integer scales
constexpr int kChunk = 64;  // tokens whose numbers of kSuper inputs, 16 KB, fit into the L1 cache
constexpr int kSuper = 256; // inputs whose scales share a number
constexpr int64_t kTokens = 512; // rounded at once
// Root mean squares of a token's inputs, beyond which a number makes its unit an outlier. Of 175 right answers of SmolLM2 172 stay; with 8
// 168, for half the time of the second pass; without it 163.
constexpr float kOutlier = 4;

// Tokens in 8 bits, and for each unit, four times in a row, its step size and the sum of its dequantized codes. With tiles codes are
// in order, with one factor per unit and one sum per block, and those of kSuper inputs of kChunk tokens are contiguous. In `rest`, the
// remainders of units with an outlier, a factor of 0 marks the other units; with tiles a bit of `outliers` marks those.
struct Rounded
{
    Rounded const* rest; // null: this is one
    int8_t* codes;
    float* factors;
    float* sums;
    uint8_t* outliers; // with tiles, in `rest`: for kSuper inputs of a token a bit for each unit
    int64_t first, tokens; // with tiles: the task's first token among those rounded at once, and their number
    int64_t units; // of a token, padded with zeros to whole steps
};

// Units of a token of `inputs`: an odd number of steps, because tokens at power-of-two distances share few sets of the L1 cache.
inline int64_t units_of(int64_t inputs, int step)
{
    return ((inputs / kUnit + step - 1) / step | 1) * step;
}

// Tokens, a bit for each.
using Marks = uint64_t;

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    Rounded const* rounded;
    int64_t token, tokens; // first one of the call, and how many
    int64_t row, rows;     // outputs: a multiple of kRows or kTile, except the last ones
    float* room; // for `exact` I floats for the weight and I for a token, for `multiply` Marks of all units of whole steps
};

struct Kernels
{
    int step; // units at once
    void (*round)(Task const& task);
    void (*multiply)(Task const& task);
    void (*exact)(Task const& task);
};

STILL_KERNEL_SETS

// `kernels_of` for these tasks: AVX-512 kernels require AVX-512 VNNI.
Kernels const& kernels_for(int set, bool half);

STILL_INLINE int64_t up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

} // namespace still_cpu::low_bit
