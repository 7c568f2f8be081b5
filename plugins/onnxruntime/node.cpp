#include "node.h"

#include <algorithm>
#include <map>
#include <string>

namespace still_ort
{
namespace
{

// ONNX Runtime has no status for an absent attribute: any failure to read one means that.
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

// Whether the node has the input; an omitted optional one has an empty name.
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
    return still::make_tensor(to_type(type), dims, static_cast<int64_t>(rank), name); // throws for more dimensions
}

} // namespace

JoinedStates read_joined(still::OpSpec const& spec, OrtKernelInfo const* info)
{
    still::AttributeValue value{still::AttributeKind::kString, 0, 0.0, {}};
    if (!read(info, {"states", still::AttributeKind::kString, 0, 0.0, "", {}}, value))
        still::fail(spec.name, ": joined states need the attribute states, which is missing.");
    return {spec, value.text};
}

still::Op read_op(still::OpSpec const& spec, OrtKernelInfo const* info, JoinedStates const* joined)
{
    std::map<std::string, still::AttributeValue> values;
    for (still::AttributeSpec const& attribute : spec.attributes)
        if (still::AttributeValue value{attribute.kind, 0, 0.0, {}}; read(info, attribute, value))
            values[attribute.name] = value;
    uint64_t absent = 0;
    size_t const separate = joined ? joined->first : spec.inputs.size();
    for (size_t i = 0; i < separate; ++i)
        absent |= has_input(info, i) ? 0 : uint64_t{1} << i;
    for (size_t i = separate; i < spec.inputs.size(); ++i)
        absent |= uint64_t{1} << i;
    if (joined)
        for (JoinedStates::Place const& place : joined->places)
            absent &= ~(uint64_t{1} << place.input);
    return {spec, values, absent};
}

Inputs::Inputs(still::Op const& op, OrtKernelContext const* context, JoinedStates const* joined) : values(op.spec().inputs.size())
{
    tensors.reserve(values.size());
    OrtValue const* both[2]{};
    still::Type types[2]{};
    for (size_t i = 0; joined && i < 2; ++i)
    {
        check(g_api->KernelContext_GetInput(context, joined->first + i, &both[i]));
        if (!both[i])
            still::fail(op.spec().name, ": the joined states are missing.");
        still::Tensor const tensor = tensor_of(both[i], "joined states");
        int64_t size = 1;
        for (int axis = 1; axis < tensor.rank; ++axis)
            if (tensor.dims[axis] < 0 || __builtin_mul_overflow(size, tensor.dims[axis], &size))
                size = -1;
        if (tensor.rank == 0 || size != joined->sizes[i] || (i && tensor.dims[0] != rows))
            still::fail(op.spec().name, ": joined states are ", tensor.shape(), "; a row of the attribute states has ", joined->sizes[i],
                " elements.");
        rows = tensor.dims[0];
        types[i] = tensor.type;
    }
    for (size_t i = 0; i < values.size(); ++i)
    {
        if (op.absent_inputs() >> i & 1)
            continue;
        if (joined && i >= joined->first)
        {
            JoinedStates::Place const& place = joined->at(i);
            int64_t dims[still::kMaxRank]{rows};
            std::copy_n(place.row.dims, place.row.rank, dims + 1);
            values[i] = both[place.tensor];
            tensors.push_back(still::make_tensor(types[place.tensor], dims, place.row.rank + 1, op.spec().inputs[i].name));
            continue;
        }
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

void* like_of(OrtKernelContext* context, size_t place, OrtValue const* input)
{
    return output_of(context, place, tensor_of(input, "joined states"));
}

} // namespace still_ort
