// Feed-forward layers that tokens choose, on the CPU. Knows no host: a host gives tensors, scratch memory and a way to run tasks.
//
// Pairs of token and expert are sorted by expert; what is read of the weights is the experts that were chosen, row by row where they lie.
// A token's sums are made in one order, whatever else the call has: a call of several tokens gives bit for bit what calls of each give.
// Matrices in blocks are those of ../matmul_nbits: tokens, and what the second matrix reads, are rounded to 8 bits where it rounds.
#pragma once

#include "../../matmul_nbits/cpu/matmul_nbits.h"

namespace still_cpu::experts
{

struct Layer
{
    low_bit::Layer gate_up, down; // of an expert; bits 0: numbers of the activations' type
    int64_t experts;              // E
    int64_t chosen;               // K of a token
    bool gated;                   // rows of gate and up projection take turns, silu(gate) * up; else relu(up)^2
    bool half;                    // activations are float16

    int64_t channels() const { return gate_up.inputs; }
    int64_t inner() const { return down.inputs; }
};

// A matrix of all experts; scales and zero points of blocks alone, zero points may be null.
struct Matrix
{
    void const* values;
    void const* scales;
    uint8_t const* zero_points;
};

// Data of a call; shapes as in the OpSpec.
struct Tensors
{
    void const* input;
    int32_t const* expert;
    float const* weight;
    Matrix gate_up, down;
    void* output;
    int64_t tokens; // of all sequences
};

// Bytes of scratch for a call; no alignment needed.
size_t scratch_size(Layer const& layer, int64_t tokens, int instruction_set);

// Throws still::Error for an expert that there is not.
void mix(Layer const& layer, Tensors const& tensors, void* scratch, Host const& host, int instruction_set);

} // namespace still_cpu::experts
