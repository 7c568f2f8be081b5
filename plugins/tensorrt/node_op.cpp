#include "node_op.h"

#include "../core/error.h"
#include "../core/json.h"

#include <algorithm>

namespace still
{
namespace
{

bool joined(TensorSpec const& spec, int32_t rank)
{
    return spec.type == ElementType::kActivation && !spec.weight && !spec.state && spec.shape.size() == 4 && rank == 3;
}

} // namespace

NodeOp::NodeOp(OpSpec const& spec, Json const& values) : mOp(read_op(spec, values)), mType(read_activation_type(spec, values)) {}
NodeOp::NodeOp(OpSpec const& spec, nvinfer1::PluginFieldCollection const& fields) : NodeOp(spec, read_fields(fields)) {}
NodeOp::NodeOp(OpSpec const& spec, std::string_view stored) : NodeOp(spec, read_stored(stored)) {}

bool NodeOp::accepts(int32_t position, nvinfer1::DataType type, nvinfer1::DataType activation) const
{
    auto const inputs = static_cast<int32_t>(mOp.inputs().size());
    TensorSpec const& spec
        = position < inputs ? *mOp.inputs()[static_cast<size_t>(position)] : *mOp.outputs()[static_cast<size_t>(position - inputs)];
    Type const actual = to_type(type);
    switch (spec.type)
    {
    case ElementType::kFloat32: return actual == Type::kFloat32;
    case ElementType::kInteger:
    case ElementType::kInt32: return actual == Type::kInt32;
    case ElementType::kActivation: break;
    }
    if (position != first_activation())
        return type == activation;
    if (!mType.empty())
        return mType == type_name(actual);
    return actual == Type::kFloat16 || actual == Type::kBFloat16 || actual == Type::kFloat32;
}

int32_t NodeOp::first_activation() const
{
    auto const& inputs = mOp.inputs();
    auto const found = std::find_if(
        inputs.begin(), inputs.end(), [](TensorSpec const* spec) { return spec->type == ElementType::kActivation; });
    return static_cast<int32_t>(found - inputs.begin());
}

nvinfer1::DataType NodeOp::output_type(int32_t index, nvinfer1::DataType const* inputs) const
{
    switch (mOp.outputs()[static_cast<size_t>(index)]->type)
    {
    case ElementType::kActivation: return inputs[first_activation()];
    case ElementType::kInteger:
    case ElementType::kInt32: return nvinfer1::DataType::kINT32;
    case ElementType::kFloat32: break;
    }
    return nvinfer1::DataType::kFLOAT;
}

nvinfer1::DimsExprs NodeOp::output_shape(int32_t index, nvinfer1::DimsExprs const* inputs, nvinfer1::IExprBuilder& builder) const
{
    TensorSpec const& spec = *mOp.outputs()[static_cast<size_t>(index)];
    auto const first = static_cast<size_t>(first_activation());
    if (spec.shape == mOp.inputs()[first]->shape && (inputs[first].nbDims == 4 || joined(spec, inputs[first].nbDims)))
        return inputs[first]; // heads flattened or not
    std::vector<int32_t> ranks;
    for (size_t i = 0; i < mOp.inputs().size(); ++i)
        ranks.push_back(inputs[i].nbDims);
    nvinfer1::DimsExprs shape;
    shape.nbDims = static_cast<int32_t>(spec.shape.size());
    for (size_t axis = 0; axis < spec.shape.size(); ++axis)
    {
        auto const place = locate(spec.shape[axis], ranks);
        auto const stated = mOp.attributes().find(spec.shape[axis]);
        if (!place && stated == mOp.attributes().end())
            fail(mOp.spec().name, ": no input has the dimension ", spec.shape[axis], " of ", spec.name, ".");
        shape.d[axis] = place ? inputs[place->first].d[place->second] : builder.constant(static_cast<int32_t>(stated->second.integer));
    }
    return shape;
}

std::vector<Tensor> NodeOp::tensors(std::vector<Tensor> given) const
{
    if (given.size() != mOp.inputs().size())
        return given; // the op refuses it
    std::vector<int32_t> ranks;
    for (Tensor const& tensor : given)
        ranks.push_back(tensor.rank);
    auto result = given;
    for (size_t i = 0; i < result.size(); ++i)
    {
        TensorSpec const& spec = *mOp.inputs()[i];
        if (!joined(spec, ranks[i]))
            continue;
        auto place = locate(spec.shape.back(), ranks);
        int64_t last = place ? given[place->first].dims[place->second] : 0;
        if (!place && (place = locate(spec.shape.back() + kWords, ranks)))
            last = given[place->first].dims[place->second] * kCodesOfWord;
        int64_t& heads = result[i].dims[ranks[i] - 1];
        if (last <= 0 || heads % last)
            continue;
        heads /= last;
        result[i].dims[result[i].rank++] = last;
    }
    return result;
}

std::vector<Tensor> NodeOp::tensors(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const
{
    std::vector<Tensor> given;
    for (int32_t i = 0; i < count; ++i)
        given.push_back(to_tensor(inputs[i].type, inputs[i].dims));
    return tensors(std::move(given));
}

void NodeOp::prepare(nvinfer1::PluginTensorDesc const* inputs, int32_t count)
{
    auto const known = tensors(inputs, count);
    if (!mOp.prepared(known))
        mOp.prepare(known);
}

void NodeOp::preload() const
{
    Type known = Type::kNone;
    for (Type const type : {Type::kFloat16, Type::kBFloat16, Type::kFloat32})
        if (mType == type_name(type))
            known = type;
    mOp.preload(known);
}

std::optional<std::pair<size_t, size_t>> NodeOp::locate(std::string const& symbol, std::vector<int32_t> const& ranks) const
{
    for (bool const weights : {false, true}) // weights last: theirs may be 1 for all heads
    {
        for (size_t i = 0; i < mOp.inputs().size(); ++i)
        {
            TensorSpec const& spec = *mOp.inputs()[i];
            if (spec.weight != weights)
                continue;
            auto const end = spec.shape.end() - (joined(spec, ranks[i]) ? 2 : 0);
            auto const found = std::find(spec.shape.begin(), end, symbol);
            if (found != end)
                return std::make_pair(i, static_cast<size_t>(found - spec.shape.begin()));
        }
    }
    return std::nullopt;
}

} // namespace still
