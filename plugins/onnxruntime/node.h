// A still op's node in ONNX Runtime: converts attributes and inputs to the core's Op and tensors, for every provider.
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

// The node's attribute `states`; throws still::Error if it is missing.
JoinedStates read_joined(still::OpSpec const& spec, OrtKernelInfo const* info);

// The op of a node: its attributes and present inputs. Throws still::Error for an unknown value.
still::Op read_op(still::OpSpec const& spec, OrtKernelInfo const* info, JoinedStates const* joined = nullptr);

// The inputs of a call.
struct Inputs
{
    std::vector<OrtValue const*> values; // by index in the OpSpec; null if absent; for a joined state the tensor that contains it
    std::vector<still::Tensor> tensors;  // of the existing ones, in order
    int64_t rows{};                      // B of joined states

    Inputs(still::Op const& op, OrtKernelContext const* context, JoinedStates const* joined = nullptr);
};

// The memory of an output, by its index in the OpSpec.
void* output_of(OrtKernelContext* context, size_t place, still::Tensor const& tensor);

// The memory of an output with the shape of an input.
void* like_of(OrtKernelContext* context, size_t place, OrtValue const* input);

struct Node
{
    virtual ~Node() = default;
    virtual void compute(OrtKernelContext* context) = 0;
};

// These throw still::Error for an unsupported node.
std::unique_ptr<Node> make_cpu_node(
    still_cpu::Entry const& entry, still::OpSpec const& spec, OrtKernelInfo const* info, bool half, bool joined);
std::unique_ptr<Node> make_cuda_node(still::OpSpec const& spec, OrtKernelInfo const* info, still::Type activation);

} // namespace still_ort
