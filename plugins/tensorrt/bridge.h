// What both TensorRT adapters share: the plugin's fields, its logger, and the translation of types and shapes.
#pragma once

#include "../core/error.h"
#include "../core/op.h"

#include <NvInfer.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace still
{

// Fields beside the op's attributes; the lowering pass adds them to a node.
constexpr char kAbsentInputs[] = "absent_inputs";     // INT, bit i: the op's input i is not passed
constexpr char kActivationType[] = "activation_type"; // STRING: the type that the plugin insists on; "" any

// Set through setLoggerFinder by a host that loads the library as a plugin library.
inline nvinfer1::ILoggerFinder*& logger_finder()
{
    static nvinfer1::ILoggerFinder* finder = nullptr;
    return finder;
}

inline void log_error(std::string const& text) noexcept
{
    auto* const finder = logger_finder();
    auto* const logger = finder ? finder->findLogger() : nullptr;
    if (logger)
        logger->log(nvinfer1::ILogger::Severity::kERROR, ("still: " + text).c_str());
    else
        std::fprintf(stderr, "still: %s\n", text.c_str());
}

// Runs `body`; an exception becomes a log line and `failure`.
template <typename Result, typename Body>
Result logged(Result failure, Body const& body) noexcept
{
    try
    {
        return body();
    }
    catch (std::exception const& error)
    {
        log_error(error.what());
    }
    catch (...)
    {
        log_error("unknown exception");
    }
    return failure;
}

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

// The op of a node plus the type it insists on; made from plugin fields and turned back into them.
//
// A tensor of activations may come with its last two dimensions as one, heads side by side: [B, T, H*D] is the same memory as
// [B, T, H, D]. TensorRT 8.6 also tries a format for images where a layer's tensor has four dimensions, which doubles the build.
class NodeOp
{
public:
    NodeOp(OpSpec const& spec, nvinfer1::PluginFieldCollection const& fields)
        : mOp(make(spec, fields)), mType(text(fields, kActivationType))
    {
        if (!mType.empty() && mType != "float16" && mType != "bfloat16" && mType != "float32")
            fail(spec.name, ": ", kActivationType, "=\"", mType, "\" is unknown; known: float16, bfloat16, float32.");
    }

    Op const& op() const { return mOp; }
    Op& op() { return mOp; }

    // True when tensor `position` (inputs, then outputs) may have this type, given the types of those before it.
    template <typename TypeAt>
    bool accepts(int32_t position, nvinfer1::DataType type, TypeAt const& type_at) const
    {
        auto const inputs = static_cast<int32_t>(mOp.inputs().size());
        TensorSpec const& spec
            = position < inputs ? *mOp.inputs()[static_cast<size_t>(position)] : *mOp.outputs()[static_cast<size_t>(position - inputs)];
        Type const actual = to_type(type);
        switch (spec.type)
        {
        case ElementType::kFloat32: return actual == Type::kFloat32;
        case ElementType::kInteger: return actual == Type::kInt32;
        case ElementType::kActivation: break;
        }
        int32_t const first = first_activation();
        if (position != first)
            return type == type_at(first);
        if (!mType.empty())
            return mType == type_name(actual);
        return actual == Type::kFloat16 || actual == Type::kBFloat16 || actual == Type::kFloat32;
    }

    nvinfer1::DataType output_type(int32_t index, nvinfer1::DataType const* inputs) const
    {
        switch (mOp.outputs()[static_cast<size_t>(index)]->type)
        {
        case ElementType::kActivation: return inputs[first_activation()];
        case ElementType::kInteger: return nvinfer1::DataType::kINT32;
        case ElementType::kFloat32: break;
        }
        return nvinfer1::DataType::kFLOAT;
    }

    // Every output dimension is a dimension of some input: the OpSpec's symbols say which.
    nvinfer1::DimsExprs output_shape(int32_t index, nvinfer1::DimsExprs const* inputs) const
    {
        TensorSpec const& spec = *mOp.outputs()[static_cast<size_t>(index)];
        auto const first = static_cast<size_t>(first_activation());
        if (spec.shape == mOp.inputs()[first]->shape && (inputs[first].nbDims == 4 || joined(spec, inputs[first].nbDims)))
            return inputs[first]; // heads side by side or not
        nvinfer1::DimsExprs shape;
        shape.nbDims = static_cast<int32_t>(spec.shape.size());
        for (size_t axis = 0; axis < spec.shape.size(); ++axis)
        {
            auto const place = locate(spec.shape[axis], [&](size_t input) { return inputs[input].nbDims; });
            if (!place)
                fail(mOp.spec().name, ": no input tells the dimension ", spec.shape[axis], " of ", spec.name, ".");
            shape.d[axis] = inputs[place->first].d[place->second];
        }
        return shape;
    }

    // The inputs as the op knows them, of `dims_at(i)` and `type_at(i)`: heads that lie side by side are told apart.
    template <typename TypeAt, typename DimsAt>
    std::vector<Tensor> tensors(int32_t count, TypeAt const& type_at, DimsAt const& dims_at) const
    {
        std::vector<Tensor> result;
        for (int32_t i = 0; i < count; ++i)
            result.push_back(to_tensor(type_at(i), dims_at(i)));
        if (result.size() != mOp.inputs().size())
            return result; // the op refuses that
        auto const given = result;
        for (size_t i = 0; i < result.size(); ++i)
        {
            TensorSpec const& spec = *mOp.inputs()[i];
            if (!joined(spec, given[i].rank))
                continue;
            auto const place = locate(spec.shape.back(), [&](size_t input) { return given[input].rank; });
            int64_t const last = place ? given[place->first].dims[place->second] : 0;
            int64_t& heads = result[i].dims[given[i].rank - 1];
            if (last <= 0 || heads % last)
                continue;
            heads /= last;
            result[i].dims[result[i].rank++] = last;
        }
        return result;
    }

    std::vector<Tensor> tensors(nvinfer1::PluginTensorDesc const* inputs, int32_t count) const
    {
        return tensors(count, [&](int32_t i) { return inputs[i].type; }, [&](int32_t i) { return inputs[i].dims; });
    }

    // Prepares for these shapes unless that was done.
    void prepare(nvinfer1::PluginTensorDesc const* inputs, int32_t count)
    {
        auto const tensors = this->tensors(inputs, count);
        if (!mOp.prepared(tensors))
            mOp.prepare(tensors);
    }

    // Loads every kernel that the attributes leave possible; for hosts that tell the shapes only when they launch.
    void preload() const
    {
        Type known = Type::kNone;
        for (Type const type : {Type::kFloat16, Type::kBFloat16, Type::kFloat32})
            if (mType == type_name(type))
                known = type;
        mOp.preload(known);
    }

    // The values as plugin fields, which point into this object.
    nvinfer1::PluginFieldCollection fields()
    {
        mFields.clear();
        mIntegers.clear();
        mReals.clear();
        mTexts.clear();
        for (AttributeSpec const& spec : mOp.spec().attributes)
        {
            AttributeValue const& value = mOp.attributes().at(spec.name);
            if (spec.kind == AttributeKind::kInteger)
                add_integer(spec.name.c_str(), value.integer);
            else if (spec.kind == AttributeKind::kFloat)
                add_real(spec.name.c_str(), value.real);
            else
                add_text(spec.name.c_str(), value.text);
        }
        add_integer(kAbsentInputs, static_cast<int64_t>(mOp.absent_inputs()));
        add_text(kActivationType, mType);
        return {static_cast<int32_t>(mFields.size()), mFields.data()};
    }

    // Names and types of all fields, without values; for a creator.
    static std::vector<nvinfer1::PluginField> declared(OpSpec const& spec)
    {
        std::vector<nvinfer1::PluginField> fields;
        for (AttributeSpec const& attribute : spec.attributes)
            fields.emplace_back(attribute.name.c_str(), nullptr, field_type(attribute.kind), 1);
        fields.emplace_back(kAbsentInputs, nullptr, nvinfer1::PluginFieldType::kINT32, 1);
        fields.emplace_back(kActivationType, nullptr, nvinfer1::PluginFieldType::kCHAR, 1);
        return fields;
    }

private:
    static nvinfer1::PluginFieldType field_type(AttributeKind kind)
    {
        switch (kind)
        {
        case AttributeKind::kInteger: return nvinfer1::PluginFieldType::kINT32;
        case AttributeKind::kFloat: return nvinfer1::PluginFieldType::kFLOAT32;
        case AttributeKind::kString: break;
        }
        return nvinfer1::PluginFieldType::kCHAR;
    }

    static nvinfer1::PluginField const* field(nvinfer1::PluginFieldCollection const& fields, std::string const& name)
    {
        for (int i = 0; i < fields.nbFields; ++i)
            if (name == fields.fields[i].name && fields.fields[i].data && fields.fields[i].length > 0)
                return &fields.fields[i];
        return nullptr;
    }

    // Strings come with or without a trailing NUL, depending on who made them.
    static std::string text(nvinfer1::PluginFieldCollection const& fields, std::string const& name)
    {
        auto const* const found = field(fields, name);
        if (!found)
            return {};
        auto const* const begin = static_cast<char const*>(found->data);
        return {begin, strnlen(begin, static_cast<size_t>(found->length))};
    }

    static AttributeValue value(OpSpec const& op, AttributeSpec const& spec, nvinfer1::PluginFieldCollection const& fields)
    {
        auto const* const found = field(fields, spec.name);
        if (!found)
            fail(op.name, ": the node lacks the attribute ", spec.name, ". Lower the graph for TensorRT with still-export.");
        AttributeValue result{spec.kind, 0, 0.0, {}};
        if (found->type != field_type(spec.kind))
            fail(op.name, ": attribute ", spec.name, " has the wrong type.");
        if (spec.kind == AttributeKind::kInteger)
            result.integer = *static_cast<int32_t const*>(found->data);
        else if (spec.kind == AttributeKind::kFloat)
            result.real = static_cast<double>(*static_cast<float const*>(found->data));
        else
            result.text = text(fields, spec.name);
        return result;
    }

    static Op make(OpSpec const& spec, nvinfer1::PluginFieldCollection const& fields)
    {
        std::map<std::string, AttributeValue> values;
        for (AttributeSpec const& attribute : spec.attributes)
            values[attribute.name] = value(spec, attribute, fields);
        AttributeSpec const absent{kAbsentInputs, AttributeKind::kInteger, 0, 0.0, {}, {}};
        return {spec, values, static_cast<uint64_t>(static_cast<uint32_t>(value(spec, absent, fields).integer))};
    }

    static bool joined(TensorSpec const& spec, int32_t rank)
    {
        return spec.type == ElementType::kActivation && !spec.weight && !spec.state && spec.shape.size() == 4 && rank == 3;
    }

    // Input and axis that have the dimension `symbol` alone.
    template <typename RankAt>
    std::optional<std::pair<size_t, size_t>> locate(std::string const& symbol, RankAt const& rank_at) const
    {
        for (size_t i = 0; i < mOp.inputs().size(); ++i)
        {
            TensorSpec const& spec = *mOp.inputs()[i];
            if (spec.weight)
                continue; // may be shared by all heads
            auto const end = spec.shape.end() - (joined(spec, rank_at(i)) ? 2 : 0);
            auto const found = std::find(spec.shape.begin(), end, symbol);
            if (found != end)
                return std::make_pair(i, static_cast<size_t>(found - spec.shape.begin()));
        }
        return std::nullopt;
    }

    int32_t first_activation() const
    {
        auto const& inputs = mOp.inputs();
        auto const found = std::find_if(
            inputs.begin(), inputs.end(), [](TensorSpec const* spec) { return spec->type == ElementType::kActivation; });
        return static_cast<int32_t>(found - inputs.begin());
    }

    void add_integer(char const* name, int64_t value)
    {
        mIntegers.push_back(static_cast<int32_t>(value));
        mFields.emplace_back(name, &mIntegers.back(), nvinfer1::PluginFieldType::kINT32, 1);
    }

    void add_real(char const* name, double value)
    {
        mReals.push_back(static_cast<float>(value));
        mFields.emplace_back(name, &mReals.back(), nvinfer1::PluginFieldType::kFLOAT32, 1);
    }

    void add_text(char const* name, std::string const& value)
    {
        mTexts.push_back(value);
        mFields.emplace_back(name, mTexts.back().c_str(), nvinfer1::PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1));
    }

    Op mOp;
    std::string mType;
    std::vector<nvinfer1::PluginField> mFields;
    // Deques keep the addresses that the fields point to.
    std::deque<int32_t> mIntegers;
    std::deque<float> mReals;
    std::deque<std::string> mTexts;
};

} // namespace still
