#include "node.h"

#include <map>
#include <string>

namespace still_ort
{
namespace
{

// ONNX Runtime knows no "absent": every failure to read an attribute means it.
bool found(OrtStatus* status)
{
    if (status)
        g_api->ReleaseStatus(status);
    return !status;
}

bool read(OrtKernelInfo const* info, still::AttributeSpec const& spec, still::AttributeValue& value)
{
    char const* const name = spec.name.c_str();
    switch (spec.kind)
    {
    case still::AttributeKind::kInteger: return found(g_api->KernelInfoGetAttribute_int64(info, name, &value.integer));
    case still::AttributeKind::kFloat:
    {
        float real = 0;
        bool const there = found(g_api->KernelInfoGetAttribute_float(info, name, &real));
        value.real = static_cast<double>(real);
        return there;
    }
    case still::AttributeKind::kString: break;
    }
    size_t size = 0; // with the NUL at the end
    if (!found(g_api->KernelInfoGetAttribute_string(info, name, nullptr, &size)) || size == 0)
        return false;
    value.text.resize(size);
    check(g_api->KernelInfoGetAttribute_string(info, name, value.text.data(), &size));
    value.text.resize(size - 1);
    return true;
}

// Whether the node has the input; an optional one that is left out has an empty name.
bool has_input(OrtKernelInfo const* info, size_t place)
{
    size_t count = 0;
    check(g_api->KernelInfo_GetInputCount(info, &count));
    if (place >= count)
        return false;
    size_t size = 0; // with the NUL at the end
    check(g_api->KernelInfo_GetInputName(info, place, nullptr, &size));
    return size > 1;
}

still::Type to_type(ONNXTensorElementDataType type)
{
    switch (type)
    {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return still::Type::kFloat32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return still::Type::kFloat16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: return still::Type::kBFloat16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return still::Type::kInt32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return still::Type::kInt64;
    default: return still::Type::kNone;
    }
}

still::Tensor tensor_of(OrtValue const* value, std::string const& name)
{
    OrtTensorTypeAndShapeInfo* info;
    check(g_api->GetTensorTypeAndShape(value, &info));
    std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> const owner(
        info, g_api->ReleaseTensorTypeAndShapeInfo);
    ONNXTensorElementDataType type;
    size_t rank;
    int64_t dims[still::kMaxRank]{};
    check(g_api->GetTensorElementType(info, &type));
    check(g_api->GetDimensionsCount(info, &rank));
    if (rank <= still::kMaxRank)
        check(g_api->GetDimensions(info, dims, rank));
    return still::make_tensor(to_type(type), dims, static_cast<int64_t>(rank), name); // refuses more
}

} // namespace

still::Op read_op(still::OpSpec const& spec, OrtKernelInfo const* info)
{
    std::map<std::string, still::AttributeValue> values;
    for (still::AttributeSpec const& attribute : spec.attributes)
        if (still::AttributeValue value{attribute.kind, 0, 0.0, {}}; read(info, attribute, value))
            values[attribute.name] = value;
    uint64_t absent = 0;
    for (size_t i = 0; i < spec.inputs.size(); ++i)
        absent |= has_input(info, i) ? 0 : uint64_t{1} << i;
    return {spec, values, absent};
}

Inputs::Inputs(still::Op const& op, OrtKernelContext const* context) : values(op.spec().inputs.size())
{
    tensors.reserve(values.size());
    for (size_t i = 0; i < values.size(); ++i)
    {
        if (op.absent_inputs() >> i & 1)
            continue;
        check(g_api->KernelContext_GetInput(context, i, &values[i]));
        std::string const& name = op.spec().inputs[i].name;
        if (!values[i])
            still::fail(op.spec().name, ": ", name, " is not there.");
        tensors.push_back(tensor_of(values[i], name));
    }
}

void* output_of(OrtKernelContext* context, size_t place, still::Tensor const& tensor)
{
    OrtValue* value;
    check(g_api->KernelContext_GetOutput(context, place, tensor.dims, static_cast<size_t>(tensor.rank), &value));
    return data_of(value);
}

} // namespace still_ort
