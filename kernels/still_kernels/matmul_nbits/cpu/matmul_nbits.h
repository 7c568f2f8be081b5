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

// Bytes of scratch for a call; no alignment needed.
size_t scratch_size(Layer const& layer, int64_t tokens, int instruction_set);

void multiply(Layer const& layer, Tensors const& tensors, void* scratch, Host const& host, int instruction_set);

} // namespace still_cpu::low_bit
