// Plugin fields: TensorRT's form of an op's attributes, read from a node and stored in an engine.
#pragma once

#include "../core/op.h"

#include <NvInfer.h>

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace still
{

using Json = nlohmann::json;

// Fields besides the op's attributes; the lowering pass adds them to a node.
constexpr char kAbsentInputs[] = "absent_inputs";     // INT, bit i: the op's input i is not passed
constexpr char kActivationType[] = "activation_type"; // STRING: the type that the plugin requires; "" any

// The only field of a plugin in an engine, if TensorRT stores fields: STRING, the result of `stored`.
constexpr char kStored[] = "stored";

// Names and types of a node's fields, without values; for a creator.
std::vector<nvinfer1::PluginField> declared_fields(OpSpec const& spec);

// The values of a node's fields by name, or of an engine's stored ones.
Json read_fields(nvinfer1::PluginFieldCollection const& fields);
Json read_stored(std::string_view text);

// The op with these values. Throws still::Error if one is missing, has another type, or is unknown to the op.
Op read_op(OpSpec const& spec, Json const& values);

// The type that a node requires. Throws still::Error for an unknown one.
std::string read_activation_type(OpSpec const& spec, Json const& values);

// The values of a node as text.
std::string stored(Op const& op, std::string const& activation_type);

} // namespace still
