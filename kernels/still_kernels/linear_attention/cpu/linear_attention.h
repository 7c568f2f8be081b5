// One layer of linear attention with a recurrent state, on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to
// run parallel tasks.
//
// A task is one head of one sequence, whose state stays in the L2 cache. With one decay per head, or none, tokens are processed in chunks:
// products with the state are GEMMs, and the delta rules' triangular system is solved row by row. With a decay per key channel, and in
// calls of few tokens, the recurrence goes token by token and reads and writes the state once per token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::linear
{

struct Layer
{
    int query_groups; // HQ
    int shared;       // G
    int key_heads;    // HK
    int dim;          // D
    int heads;        // H
    int size;         // V
    int decay;        // E; 0: none
    int betas;        // W; 0: no delta rule
    float scale;
    bool half; // query, key, value and output are float16
};

// Data of a call; shapes as in the OpSpec, `void` points to float or to float16. The state is read and written.
struct Tensors
{
    void const* query;
    void const* key;
    void const* value;
    float const* decay;
    float const* beta;
    void* output;
    float* state;
    int64_t tokens; // T
};

// Runs the call. `brought` are the rows' new tokens; output and state are complete afterwards.
// The result depends neither on the host's threads nor on the order of tasks.
void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, Host& host);

// Compiled once per instruction set as a table of functions, with their data types:

// Tokens of a chunk. The state is read once per chunk; a token's cost besides its three products with the state grows with the chunk.
constexpr int kChunk = 32;
// Calls of fewer new tokens go token by token.
constexpr int kLeastChunked = 4;

struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    int row;
    int head;
    int64_t count; // of new tokens
    float* room;
};

struct Kernels
{
    // Floats required in `Task::room`.
    size_t (*room)(Layer const& layer);
    // All new tokens of the task's row, for its head.
    void (*run)(Task const& task);
};

STILL_KERNEL_SETS

} // namespace still_cpu::linear
