// still::HybridAttention: from a node's attributes and a call's shapes to the layer that the kernels know.
#pragma once

#include "../cpu/hybrid_attention/hybrid_attention.h"
#include "schema.h"

namespace still_ort::hybrid
{

using still_cpu::hybrid::Layer;

still::OpSpec const& op_spec();

// Places of the inputs; outputs are `output`, then the states in the same order.
enum Input
{
    kQuery,
    kKey,
    kValue,
    kGate,
    kFeatureQWeight,
    kFeatureKWeight,
    kWindowFactor,
    kNewTokens,
    kPastLength,
    kPastWindowKey,
    kPastWindowValue,
    kPastWindowScore,
    kPastSalientKey,
    kPastSalientValue,
    kPastSalientScore,
    kPastKvState,
    kPastZState,
    kInputs
};

// The attributes of a node; throws Refused for a value that no kernel knows.
Layer read_attributes(Attributes const& attributes, bool half);

struct Sizes
{
    Layer layer;
    int batch;
    int64_t tokens;
};

// Completes the layer by the inputs' shapes; throws Refused where they contradict the OpSpec or each other.
Sizes read_shapes(Layer layer, Shapes const& shapes);

// Throws Refused for counts outside their range and for rows that outgrow the salient cache.
void check_counts(Sizes const& sizes, int64_t const* past, int64_t const* brought);

} // namespace still_ort::hybrid
