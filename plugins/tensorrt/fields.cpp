#include "fields.h"

#include "../core/error.h"
#include "../core/json.h"

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

AttributeValue read_value(OpSpec const& op, std::string const& name, AttributeKind kind, Json const& values)
{
    if (!values.contains(name))
        fail(op.name, ": the node lacks the attribute ", name, ". Lower the graph for TensorRT with still-export.");
    Json const& found = values[name];
    if (kind == AttributeKind::kInteger && found.is_number_integer())
        return {kind, integer_of(found), 0.0, {}};
    if (kind == AttributeKind::kFloat && found.is_number_float())
        return {kind, 0, found.get<double>(), {}};
    if (kind == AttributeKind::kString && found.is_string())
        return {kind, 0, 0.0, text_of(found)};
    fail(op.name, ": attribute ", name, " has the wrong type.");
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

Json read_fields(PluginFieldCollection const& fields)
{
    Json values = Json::object();
    for (int i = 0; i < fields.nbFields; ++i)
    {
        PluginField const& field = fields.fields[i];
        if (!field.data || field.length <= 0)
            continue;
        auto const* const text = static_cast<char const*>(field.data);
        switch (field.type)
        {
        case PluginFieldType::kINT32: values[field.name] = *static_cast<int32_t const*>(field.data); break;
        case PluginFieldType::kFLOAT32: values[field.name] = static_cast<double>(*static_cast<float const*>(field.data)); break;
        // Strings may have a trailing NUL, depending on their source.
        case PluginFieldType::kCHAR: values[field.name] = std::string(text, strnlen(text, static_cast<size_t>(field.length))); break;
        default: values[field.name] = nullptr;
        }
    }
    return values.contains(kStored) ? read_stored(text_of(values[kStored])) : values;
}

Json read_stored(std::string_view text)
{
    Json values = parse_json(text, "the engine's plugin data, of another plugin library or truncated (rebuild the engine with this one),");
    members_of(values);
    return values;
}

Op read_op(OpSpec const& spec, Json const& values)
{
    std::map<std::string, AttributeValue> attributes;
    for (AttributeSpec const& attribute : spec.attributes)
        attributes[attribute.name] = read_value(spec, attribute.name, attribute.kind, values);
    return {spec, attributes, static_cast<uint32_t>(read_value(spec, kAbsentInputs, AttributeKind::kInteger, values).integer)};
}

std::string read_activation_type(OpSpec const& spec, Json const& values)
{
    std::string const type = values.contains(kActivationType) ? text_of(values[kActivationType]) : "";
    if (!type.empty() && type != "float16" && type != "bfloat16" && type != "float32")
        fail(spec.name, ": ", kActivationType, "=\"", type, "\" is unknown; known: float16, bfloat16, float32.");
    return type;
}

std::string stored(Op const& op, std::string const& activation_type)
{
    Json values{{kAbsentInputs, op.absent_inputs()}, {kActivationType, activation_type}};
    for (auto const& [name, value] : op.attributes())
    {
        if (value.kind == AttributeKind::kInteger)
            values[name] = value.integer;
        else if (value.kind == AttributeKind::kFloat)
            values[name] = value.real;
        else
            values[name] = value.text;
    }
    return values.dump();
}

} // namespace still
