// The op of a node, as both TensorRT adapters use it: types, shapes and the tensors of a call.
#pragma once

#include "fields.h"

#include "../core/tensor.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace still
{

// TensorRT's types and shapes as the core's.
inline Type to_type(nvinfer1::DataType type)
{
    switch (type)
    {
    case nvinfer1::DataType::kFLOAT: return Type::kFloat32;
    case nvinfer1::DataType::kHALF: return Type::kFloat16;
    case nvinfer1::DataType::kINT32: return Type::kInt32;
#if NV_TENSORRT_MAJOR >= 10
    case nvinfer1::DataType::kBF16: return Type::kBFloat16;
    case nvinfer1::DataType::kINT64: return Type::kInt64;
#endif
    default: return Type::kNone;
    }
}

inline Tensor to_tensor(nvinfer1::DataType type, nvinfer1::Dims const& dims)
{
    return make_tensor(to_type(type), dims.d, dims.nbDims, "a plugin's tensor");
}

// The op of a node plus the type it insists on; made from the values of its fields.
//
// A tensor of activations may come with its last two dimensions as one, heads side by side: [B, T, H*D] is the same memory as
// [B, T, H, D]. TensorRT 8.6 also tries a format for images where a layer's tensor has four dimensions, which doubles the build.
class NodeOp
{
public:
    NodeOp(OpSpec const& spec, nvinfer1::PluginFieldCollection const& fields);
    NodeOp(OpSpec const& spec, std::string_view stored); // what an engine stores

    Op const& op() const { return mOp; }
    std::string const& activation_type() const { return mType; }

    // True when tensor `position` (inputs, then outputs) may have this type, given that of the first activation.
    bool accepts(int32_t position, nvinfer1::DataType type, nvinfer1::DataType activation) const;

    // The input with the activations' type.
    int32_t first_activation() const;

    nvinfer1::DataType output_type(int32_t index, nvinfer1::DataType const* inputs) const;

    // Every output dimension is a dimension of some input, as the OpSpec's symbols say, or an attribute.
    nvinfer1::DimsExprs output_shape(int32_t index, nvinfer1::DimsExprs const* inputs, nvinfer1::IExprBuilder& builder) const;

    // The inputs in the op's shapes: merged heads are split.
    std::vector<Tensor> tensors(std::vector<Tensor> given) const;
    std::vector<Tensor> tensors(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const;

    // Prepares for these shapes unless that was done.
    void prepare(nvinfer1::PluginTensorDesc const* inputs, int32_t count);

    // Loads every kernel that the attributes leave possible; for hosts that tell the shapes only when they launch.
    void preload() const;

private:
    NodeOp(OpSpec const& spec, Json const& values);

    // Input and axis that have the dimension `symbol` alone; `ranks` of the inputs.
    std::optional<std::pair<size_t, size_t>> locate(std::string const& symbol, std::vector<int32_t> const& ranks) const;

    Op mOp;
    std::string mType;
};

} // namespace still
