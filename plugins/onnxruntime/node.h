// A node of a still op in ONNX Runtime: from its attributes and inputs to the core's Op and tensors, whatever provider runs it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../core/op.h"
#include "../cpu/common/kernel.h"
#include "ort_api.h"

namespace still_ort
{

// The states of a node that has them joined (still_graphs/joined.py): two tensors [B, ...], the states of the activations' type in the
// first and the float32 ones in the second, all rows of a state before the next state.
struct JoinedStates
{
    struct Place
    {
        size_t input;         // in the OpSpec
        size_t tensor;        // 0 or 1
        int64_t offset;       // elements of a row in front of it
        still::Tensor tensor_of_row; // its dimensions but the batch
    };
    size_t first{};      // place of the first of both among the node's inputs
    size_t first_out{};  // likewise among its outputs
    int64_t sizes[2]{};  // elements of a row
    std::vector<Place> places;

    // Of the attribute `states`: "window_key:3,128,64;...". Throws still::Error for what is no such text.
    JoinedStates(still::OpSpec const& spec, OrtKernelInfo const* info);

    Place const& at(size_t input) const;
};

// How many of a spec's inputs or outputs stand before its states, which come last.
size_t before_states(std::vector<still::TensorSpec> const& tensors);

// The op of a node: its attributes, and which inputs it has. Throws still::Error for a value that is unknown.
still::Op read_op(still::OpSpec const& spec, OrtKernelInfo const* info, JoinedStates const* joined = nullptr);

// The inputs of a call.
struct Inputs
{
    std::vector<OrtValue const*> values; // by place in the OpSpec; null where absent; of a joined state the tensor that has it
    std::vector<still::Tensor> tensors;  // of those that exist, in order
    int64_t rows{};                      // B of joined states

    Inputs(still::Op const& op, OrtKernelContext const* context, JoinedStates const* joined = nullptr);
};

// The memory of an output, by its place in the OpSpec.
void* output_of(OrtKernelContext* context, size_t place, still::Tensor const& tensor);

// The memory of an output that is shaped as an input.
void* like_of(OrtKernelContext* context, size_t place, OrtValue const* input);

struct Node
{
    virtual ~Node() = default;
    virtual void compute(OrtKernelContext* context) = 0;
};

// These throw still::Error for a node that no kernel computes.
std::unique_ptr<Node> make_cpu_node(
    still_cpu::Entry const& entry, still::OpSpec const& spec, OrtKernelInfo const* info, bool half, bool joined);
std::unique_ptr<Node> make_cuda_node(still::OpSpec const& spec, OrtKernelInfo const* info, still::Type activation);

} // namespace still_ort
