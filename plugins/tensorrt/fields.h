// Plugin fields: what an op's attributes are to TensorRT, read from a node and stored in an engine.
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
constexpr char kActivationType[] = "activation_type"; // STRING: the type that the plugin insists on; "" any

// The one field of a plugin that an engine stores, where TensorRT stores fields: STRING, what `stored` gives.
constexpr char kStored[] = "stored";

// Names and types of a node's fields, without values; for a creator.
std::vector<nvinfer1::PluginField> declared_fields(OpSpec const& spec);

// The values of a node's fields by name, or of those that an engine stores.
Json read_fields(nvinfer1::PluginFieldCollection const& fields);
Json read_stored(std::string_view text);

// The op that has these values. Throws still::Error for one that is missing, of another type, or unknown to the op.
Op read_op(OpSpec const& spec, Json const& values);

// The type that a node insists on. Throws still::Error for an unknown one.
std::string read_activation_type(OpSpec const& spec, Json const& values);

// The values of a node as text.
std::string stored(Op const& op, std::string const& activation_type);

} // namespace still
