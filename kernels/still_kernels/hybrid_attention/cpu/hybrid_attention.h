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
struct Step
{
    int row;
    int64_t chunk; // absolute
    int64_t token; // first one, of the sequence's new tokens
    int offset;    // first one's place in the chunk
    int count;
    bool promotes; // chunk - 2 leaves the window
    int64_t held;  // salient slots in use once that is done
};

// Bytes of scratch for a call of `batch` rows, of which the longest brings `tokens`; no alignment needed.
size_t scratch_size(Layer const& layer, int batch, int64_t tokens);

// Run the call. `past` and `brought` are the rows' lengths and new tokens; output and all states are complete afterwards.
// The result depends on neither the host's threads nor the order of tasks.
void hybrid_attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* past, int64_t const* brought, void* scratch,
    Host const& host, int instruction_set);

} // namespace still_cpu::hybrid
