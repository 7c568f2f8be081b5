// Specification of an op: names, shapes, types and attributes. The values come from the spec.py of each op's folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace still
{

enum class ElementType { kActivation, kFloat32, kInteger, kInt32 }; // kInteger: counts, 32 or 64 bits depending on the host
enum class AttributeKind { kInteger, kFloat, kString };

struct TensorSpec
{
    std::string name;
    std::vector<std::string> shape; // symbols ("B") or integer attributes, multiples or parts of one ("2*C", "D/4"), numbers
    ElementType type;
    bool weight; // a dimension of 1 is shared by all heads
    bool state;
    bool optional;
    bool narrow = false; // may be float16 with float32 activations, if the kernel supports it
    bool of_codes = false; // a state that exists only if `cache` is int8
};

struct AttributeSpec
{
    std::string name;
    AttributeKind kind;
    int64_t integer;
    double real;
    std::string text;
    std::vector<std::string> choices; // empty: any value
};

struct OpSpec
{
    std::string name;
    std::string domain;
    int version;
    std::vector<TensorSpec> inputs;
    std::vector<TensorSpec> outputs;
    std::vector<AttributeSpec> attributes;
};

// Every op of this library; CMake writes the list (../CMakeLists.txt).
std::vector<OpSpec> const& op_specs();

// The op `name`; throws still::Error that lists the known ones.
OpSpec const& op_spec(std::string const& name);

} // namespace still
