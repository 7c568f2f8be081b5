// The op as ONNX Runtime sees it: attributes and shapes of a node, checked against the OpSpec.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/op_spec.h"
#include "hybrid_attention.h"

namespace still_cpu
{

// What is wrong with a node or a call: values, why, what to do.
struct Refused : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

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
constexpr int kStates = kInputs - kPastWindowKey, kOutputs = 1 + kStates;

// Reads a node's attributes: `integer(name, default)` and the like return the node's value or the default.
struct Attributes
{
    virtual ~Attributes() = default;
    virtual int64_t integer(char const* name, int64_t otherwise) const = 0;
    virtual float real(char const* name, float otherwise) const = 0;
    virtual std::string text(char const* name, std::string const& otherwise) const = 0;
};

// The attributes of a node; throws Refused for a value that no kernel knows.
Layer read_attributes(Attributes const& attributes, bool half);

// Shapes of a call's inputs; an absent one has none, a scalar's is empty.
using Shapes = std::vector<std::optional<std::vector<int64_t>>>;

struct Sizes
{
    Layer layer;
    int batch;
    int64_t tokens;
};

// Completes the layer by the inputs' shapes; throws Refused where they contradict the OpSpec or each other.
Sizes read_shapes(Layer layer, Shapes const& shapes);

// The longest sequence: sums and products with it stay far from the end of 64 bits.
constexpr int64_t kMostTokens = int64_t{1} << 40;

// Throws Refused for counts outside their range and for rows that outgrow the salient cache.
void check_counts(Sizes const& sizes, int64_t const* past, int64_t const* brought);

} // namespace still_cpu
