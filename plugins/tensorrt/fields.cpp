#include "fields.h"

#include "../core/error.h"

#include <cstring>

namespace still
{
namespace
{

using namespace nvinfer1;

PluginFieldType field_type(AttributeKind kind)
{
    switch (kind)
    {
    case AttributeKind::kInteger: return PluginFieldType::kINT32;
    case AttributeKind::kFloat: return PluginFieldType::kFLOAT32;
    case AttributeKind::kString: break;
    }
    return PluginFieldType::kCHAR;
}

PluginField const* find(PluginFieldCollection const& fields, std::string const& name)
{
    for (int i = 0; i < fields.nbFields; ++i)
        if (name == fields.fields[i].name && fields.fields[i].data && fields.fields[i].length > 0)
            return &fields.fields[i];
    return nullptr;
}

// Strings come with or without a trailing NUL, depending on who made them.
std::string text(PluginFieldCollection const& fields, std::string const& name)
{
    auto const* const found = find(fields, name);
    if (!found)
        return {};
    auto const* const begin = static_cast<char const*>(found->data);
    return {begin, strnlen(begin, static_cast<size_t>(found->length))};
}

AttributeValue value(OpSpec const& op, std::string const& name, AttributeKind kind, PluginFieldCollection const& fields)
{
    auto const* const found = find(fields, name);
    if (!found)
        fail(op.name, ": the node lacks the attribute ", name, ". Lower the graph for TensorRT with still-export.");
    AttributeValue result{kind, 0, 0.0, {}};
    if (found->type != field_type(kind))
        fail(op.name, ": attribute ", name, " has the wrong type.");
    if (kind == AttributeKind::kInteger)
        result.integer = *static_cast<int32_t const*>(found->data);
    else if (kind == AttributeKind::kFloat)
        result.real = static_cast<double>(*static_cast<float const*>(found->data));
    else
        result.text = text(fields, name);
    return result;
}

} // namespace

std::vector<PluginField> declared_fields(OpSpec const& spec)
{
    std::vector<PluginField> fields;
    for (AttributeSpec const& attribute : spec.attributes)
        fields.emplace_back(attribute.name.c_str(), nullptr, field_type(attribute.kind), 1);
    fields.emplace_back(kAbsentInputs, nullptr, PluginFieldType::kINT32, 1);
    fields.emplace_back(kActivationType, nullptr, PluginFieldType::kCHAR, 1);
    return fields;
}

Op read_op(OpSpec const& spec, PluginFieldCollection const& fields)
{
    std::map<std::string, AttributeValue> values;
    for (AttributeSpec const& attribute : spec.attributes)
        values[attribute.name] = value(spec, attribute.name, attribute.kind, fields);
    int64_t const absent = value(spec, kAbsentInputs, AttributeKind::kInteger, fields).integer;
    return {spec, values, static_cast<uint64_t>(static_cast<uint32_t>(absent))};
}

std::string read_activation_type(OpSpec const& spec, PluginFieldCollection const& fields)
{
    std::string const type = text(fields, kActivationType);
    if (!type.empty() && type != "float16" && type != "bfloat16" && type != "float32")
        fail(spec.name, ": ", kActivationType, "=\"", type, "\" is unknown; known: float16, bfloat16, float32.");
    return type;
}

Fields::Fields(Op const& op, std::string const& activation_type)
{
    for (auto const& [name, value] : op.attributes())
    {
        if (value.kind == AttributeKind::kInteger)
            add_integer(name.c_str(), value.integer);
        else if (value.kind == AttributeKind::kFloat)
            add_real(name.c_str(), value.real);
        else
            add_text(name.c_str(), value.text);
    }
    add_integer(kAbsentInputs, static_cast<int64_t>(op.absent_inputs()));
    add_text(kActivationType, activation_type);
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

void Fields::add_integer(char const* name, int64_t value)
{
    mIntegers.push_back(static_cast<int32_t>(value));
    mFields.emplace_back(mNames.emplace_back(name).c_str(), &mIntegers.back(), PluginFieldType::kINT32, 1);
}

void Fields::add_real(char const* name, double value)
{
    mReals.push_back(static_cast<float>(value));
    mFields.emplace_back(mNames.emplace_back(name).c_str(), &mReals.back(), PluginFieldType::kFLOAT32, 1);
}

void Fields::add_text(char const* name, std::string const& value)
{
    mTexts.push_back(value);
    mFields.emplace_back(mNames.emplace_back(name).c_str(), mTexts.back().c_str(), PluginFieldType::kCHAR,
        static_cast<int32_t>(value.size() + 1));
}

} // namespace still
