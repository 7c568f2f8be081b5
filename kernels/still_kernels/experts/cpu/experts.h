// Feed-forward experts, on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to run tasks.
//
// Pairs of token and expert are sorted by expert. Only the weights of chosen experts are read, row by row, in place.
// A token's sums have a fixed order: a call of several tokens gives the bits of one call for each.
// Matrices in blocks are those of ../matmul_nbits. Where they round, tokens and inputs of the second matrix are rounded to 8 bits.
#pragma once

#include "../../matmul_nbits/cpu/matmul_nbits.h"

namespace still_cpu::experts
{

struct Layer
{
    low_bit::Layer gate_up, down; // of an expert; bits 0: numbers of the activations' type
    int64_t experts;              // E
    int64_t chosen;               // K of a token
    bool gated;                   // rows of gate and up are interleaved, silu(gate) * up; else relu(up)^2
    bool half;                    // activations are float16

    int64_t channels() const { return gate_up.inputs; }
    int64_t inner() const { return down.inputs; }
};

// A matrix of all experts; only blocks have scales and zero points; zero points may be null.
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

// Throws still::Error for an unknown expert.
void mix(Layer const& layer, Tensors const& tensors, Host& host);

// Compiled once per instruction set as a table of functions, with their data types:

// Rows of one expert's matrix times its tokens.
struct Task
{
    void const* weight; // plain numbers, [outputs, inputs]
    int64_t inputs, outputs;
    int64_t row, rows;  // of the outputs
    float const* input; // [tokens, inputs]
    float* output;      // [tokens, outputs]
    int64_t tokens;
};

// Zero points and scales of the rows of a task, the sums of its tokens by block [tokens, blocks], and room for kRows * blocks
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
    // Subtracts the zero points' part from the output of `task`, whose weight is in blocks.
    void (*subtract_zeros)(Task const& task, Zeros const& zeros);
    // Sum over `chosen` rows of `parts` at `places`, each times its weight, in this order.
    void (*combine)(float const* parts, int64_t const* places, float const* weights, int64_t chosen, int64_t channels, float* sum,
        void* output);
};

STILL_KERNEL_SETS

} // namespace still_cpu::experts
