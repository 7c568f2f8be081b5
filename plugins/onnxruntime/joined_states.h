// The joined states of a node (graphs/still_graphs/functions/joined.py): two tensors [B, ...]. The first has states of the activations'
// type, or words of codes, the second float32 states, including scales of codes. All rows of a state come before the next state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../core/op_spec.h"
#include "../core/tensor.h"

namespace still_ort
{

struct JoinedStates
{
    struct Place
    {
        size_t input;      // index in the OpSpec
        size_t tensor;     // 0 or 1
        int64_t offset;    // elements of a row before it
        still::Tensor row; // its dimensions except the batch
    };
    size_t first;       // index of the first of both tensors among the node's inputs
    size_t first_out;   // likewise among its outputs
    int64_t sizes[2]{}; // elements of a row
    std::vector<Place> places;

    // `text` is the attribute `states`: "window_key:3,128,64;...". Throws still::Error if it is malformed.
    JoinedStates(still::OpSpec const& spec, std::string const& text);

    // The place of the OpSpec's input, which must be listed.
    Place const& at(size_t input) const;
};

// Number of a spec's inputs or outputs before its states, which come last.
size_t before_states(std::vector<still::TensorSpec> const& tensors);

} // namespace still_ort
