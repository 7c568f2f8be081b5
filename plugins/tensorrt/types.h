// TensorRT's types and shapes as the core's.
#pragma once

#include "../core/tensor.h"

#include <NvInfer.h>

namespace still
{

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

} // namespace still
