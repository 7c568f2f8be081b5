// A node of a still op in ONNX Runtime: from its attributes and inputs to the core's Op and tensors, whatever provider runs it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../core/op.h"
#include "../cpu/common/kernel.h"
#include "joined_states.h"
#include "ort_api.h"

namespace still_ort
{

// What the node's attribute `states` says of its joined states; throws still::Error where it is not there.
JoinedStates read_joined(still::OpSpec const& spec, OrtKernelInfo const* info);

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
