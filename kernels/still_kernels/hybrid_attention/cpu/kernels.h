// What is compiled once per instruction set, as a table of functions.
#pragma once

#include "hybrid_attention.h"

namespace still_cpu::hybrid
{

constexpr int kBlockRows = 32;  // query rows of one task: two for a chunk of 64, so that few heads occupy an even number of threads
constexpr int kTileKeys = 128;  // cached keys of one tile: with their transpose and logits they stay in the second cache
constexpr int kPartSlots = 256; // cached slots of one task in a step of one token

// Tokens that leave a full cache and go to the linear state; one per selection head.
struct Folded
{
    Kept keys; // [count, D]
    Kept values;
    int count;
};

// What a task works with.
struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    Step const* step;
    int head;
    uint8_t const* leaving_salient;  // of the chunk that is promoted, [C]: stays in softmax
    uint8_t const* previous_salient; // of the previous chunk, [C]; sliding windows only
    Folded folded;
    float* room; // of the task's thread
};

struct Kernels
{
    // Floats that `Task::room` must have.
    size_t (*room)(Layer const& layer);
    // Adds the promoted chunk's other tokens, and folded ones, to the linear state of one head.
    void (*promote)(Task const& task);
    // Attention of `rows` tokens of the step from `first` on, for one head.
    void (*attend)(Task const& task, int first, int rows);
    // Attention of a step's only token for one head. Part 0 has window, linear state and the first slots, the others more slots.
    // Writes the output where there is one part, else what `combine` needs into partial[part].
    void (*attend_part)(Task const& task, int part, int parts, float* partial);
    void (*combine)(Task const& task, int parts, float const* partial);
    // Writes a row of `count` floats; null where window and cache are of the activations' type.
    void (*keep)(void const* from, int count, Kept const& to, int64_t row);
};

// Floats of one partial result: maximum, sum, linear mass, then softmax and linear numerators.
STILL_INLINE size_t partial_size(Layer const& layer)
{
    return 3 + 2 * static_cast<size_t>(layer.dim);
}

STILL_KERNEL_SETS

} // namespace still_cpu::hybrid
