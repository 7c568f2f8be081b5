// One layer of hybrid attention on CPUs. Independent of hosts: a host passes tensors, scratch memory and a way to run parallel tasks.
//
// A call is split into steps at chunk boundaries. A step promotes the chunk that leaves the window, if one does, writes the
// new keys and values into the ring, and attends. One state machine thus serves prefill and decode, any split and ragged rows. The
// state is written in place; a host with different past and present buffers copies first.
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

// The tokens of one row in a step; all in one chunk.
struct Piece
{
    int row;
    int64_t chunk; // absolute
    int64_t token; // first one, among the sequence's new tokens
    int offset;    // the first one's place in the chunk
    int count;
    bool promotes; // chunk - 2 leaves the window
    int64_t held;  // salient slots in use after the promotion
};

// Runs the call. `past` and `brought` are the rows' lengths and new tokens; output and all states are complete afterwards.
// The result depends neither on the host's threads nor on the order of tasks.
void hybrid_attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, Host& host);

// Compiled once per instruction set as a table of functions, with their data types:

constexpr int kBlockRows = 32;  // query rows of one task: two tasks for a chunk of 64, so that few heads use an even number of threads
constexpr int kTileKeys = 128;  // cached keys of one tile, which fits into the L2 cache with its transpose and logits
constexpr int kPartSlots = 256; // cached slots of one task in a step of one token

// Tokens that leave a full cache for the linear state; one per selection head.
struct Folded
{
    Kept keys; // [count, D]
    Kept values;
    int count;
};

// Data of a task.
struct Task
{
    Layer const* layer;
    Tensors const* tensors;
    Piece const* piece;
    int head;
    uint8_t const* leaving_salient;  // of the promoted chunk, [C]: stays in softmax
    uint8_t const* previous_salient; // of the previous chunk, [C]; sliding windows only
    Folded folded;
    float* room; // of the task's thread
};

struct Kernels
{
    // Floats required in `Task::room`.
    size_t (*room)(Layer const& layer);
    // Adds the promoted chunk's other tokens, and folded ones, to the linear state of one head.
    void (*promote)(Task const& task);
    // Attention of `rows` tokens of the step from `first`, for one head.
    void (*attend)(Task const& task, int first, int rows);
    // Attention of a step's only token for one head. Part 0 has window, linear state and the first slots; the others have further slots.
    // Writes the output if there is one part, else the inputs of `combine` to partial[part].
    void (*attend_part)(Task const& task, int part, int parts, float* partial);
    void (*combine)(Task const& task, int parts, float const* partial);
    // Writes a row of `count` floats; null if window and cache have the activations' type.
    void (*keep)(void const* from, int count, Kept const& to, int64_t row);
};

// Floats of one partial result: maximum, sum, linear mass, then softmax and linear numerators.
STILL_INLINE size_t partial_size(Layer const& layer)
{
    return 3 + 2 * static_cast<size_t>(layer.dim);
}

STILL_KERNEL_SETS

} // namespace still_cpu::hybrid
