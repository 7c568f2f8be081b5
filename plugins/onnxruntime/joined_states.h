// The states of a node that has them joined (graphs/still_graphs/functions/joined.py): two tensors [B, ...], the states of the activations'
// type, or words of codes, in the first and the float32 ones, scales of codes too, in the second, all rows of a state before the next state.
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
        size_t input;      // in the OpSpec
        size_t tensor;     // 0 or 1
        int64_t offset;    // elements of a row in front of it
        still::Tensor row; // its dimensions but the batch
    };
    size_t first;       // place of the first of both tensors among the node's inputs
    size_t first_out;   // likewise among its outputs
    int64_t sizes[2]{}; // elements of a row
    std::vector<Place> places;

    // `text` is the attribute `states`: "window_key:3,128,64;...". Throws still::Error where it is no such text.
    JoinedStates(still::OpSpec const& spec, std::string const& text);

    // Of the OpSpec's input; it must be one of those listed.
    Place const& at(size_t input) const;
};

// How many of a spec's inputs or outputs stand before its states, which come last.
size_t before_states(std::vector<still::TensorSpec> const& tensors);

} // namespace still_ort
