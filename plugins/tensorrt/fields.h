// Plugin fields: what an op's attributes are to TensorRT, read from a node and stored in an engine.
#pragma once

#include "../core/op.h"

#include <NvInfer.h>

#include <deque>
#include <string>
#include <vector>

namespace still
{

// Fields beside the op's attributes; the lowering pass adds them to a node.
constexpr char kAbsentInputs[] = "absent_inputs";     // INT, bit i: the op's input i is not passed
constexpr char kActivationType[] = "activation_type"; // STRING: the type that the plugin insists on; "" any

// Names and types of all fields, without values; for a creator.
std::vector<nvinfer1::PluginField> declared_fields(OpSpec const& spec);

// The op of a node. Throws still::Error for a field that is missing, of another type, or unknown to the op.
Op read_op(OpSpec const& spec, nvinfer1::PluginFieldCollection const& fields);

// The type that a node insists on. Throws still::Error for an unknown one.
std::string read_activation_type(OpSpec const& spec, nvinfer1::PluginFieldCollection const& fields);

// The values of a node as plugin fields, which point into this object.
class Fields
{
public:
    Fields(Op const& op, std::string const& activation_type);
    Fields(Fields const&) = delete;
    Fields& operator=(Fields const&) = delete;

    nvinfer1::PluginFieldCollection const& collection() const { return mCollection; }

private:
    void add_integer(char const* name, int64_t value);
    void add_real(char const* name, double value);
    void add_text(char const* name, std::string const& value);

    std::vector<nvinfer1::PluginField> mFields;
    // Deques keep the addresses that the fields point to.
    std::deque<std::string> mNames;
    std::deque<int32_t> mIntegers;
    std::deque<float> mReals;
    std::deque<std::string> mTexts;
    nvinfer1::PluginFieldCollection mCollection{};
};

} // namespace still
