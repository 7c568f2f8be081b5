// One layer of hybrid attention on the CPU. Knows no host: a host gives tensors, scratch memory and a way to run tasks at once.
//
// A call is cut into steps that end at chunk boundaries. A step promotes the chunk that leaves the window (if one does), writes the
// new keys and values into the ring, and attends. So one state machine serves prefill and decode, any split and ragged rows; the
// state is written in place, and a host whose past and present are different buffers copies first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/host.h"
#include "cpu/common/instruction_sets.h"

namespace still_cpu::hybrid
{

enum class Scope
{
    kHead,
    kGroupMax,
    kGroupMean
};
enum class Saliency
{
    kMargin,
    kReleased
};
enum class FeatureMap
{
    kNormPreserved,
    kSoftmaxBothSigns,
    kSoftmax,
    kRelu,
    kEluPlusOne,
    kIdentity
};
enum class Overflow
{
    kError,
    kFoldOldest
};

struct Layer
{
    // Attributes.
    int chunk;   // C
    int salient; // k
    Scope scope;
    Saliency saliency;
    FeatureMap map;
    bool sliding;
    int window; // W of a sliding window
    float epsilon;
    bool phantom;
    Overflow overflow;
    // Dimensions.
    int heads;        // H
    int kv_heads;     // HK
    int dim;          // D
    int rows;         // P
    int features;     // F
    int weight_heads; // H, or 1 for shared projections
    int64_t slots;    // N
    bool half;        // activations, window and cache are float16
    Cache cache;

    STILL_INLINE int group() const { return heads / kv_heads; }
    STILL_INLINE int select_heads() const { return scope == Scope::kHead ? heads : kv_heads; }
    STILL_INLINE int element_size() const { return half ? 2 : 4; }
    STILL_INLINE int kept_size() const { return half || cache == Cache::kHalf ? 2 : cache == Cache::kCodes ? 1 : 4; }
};

// Data of a call; shapes as in the OpSpec, `void` points to float or to float16. State is read and written.
struct Tensors
{
    void const* query;
    void const* key;
    void const* value;
    void const* gate; // or null
    void const* feature_q_weight;
    void const* feature_k_weight;
    float const* window_factor; // or null
    void* output;
    Kept window_key;
    Kept window_value;
    float* window_score;
    Kept salient_key;
    Kept salient_value;
    float* kv_state;
    float* z_state;
    int64_t tokens; // T
};

// The tokens that one row brings to a step: they lie in one chunk.
struct Piece
{
    int row;
    int64_t chunk; // absolute
    int64_t token; // first one, of the sequence's new tokens
    int offset;    // first one's place in the chunk
    int count;
    bool promotes; // chunk - 2 leaves the window
    int64_t held;  // salient slots in use once that is done
};

// Run the call. `past` and `brought` are the rows' lengths and new tokens; output and all states are complete afterwards.
// The result depends on neither the host's threads nor the order of tasks.
void hybrid_attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host);

// What is compiled once per instruction set, as a table of functions, and what it works with:

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
    Piece const* piece;
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
