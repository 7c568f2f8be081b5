// Expressions of a launch plan, read from the archive's index; see kernels/still_kernels/plan/expressions.py for the language.
// Archives are untrusted: reading checks names, types and sizes, and evaluation checks arithmetic.
#pragma once

#include "op_spec.h"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace still
{

using Json = nlohmann::json;

enum class ValueKind : uint8_t { kInteger, kReal, kText };

// A name's value in one call.
struct Value
{
    bool known{};
    int64_t integer{};
    double real{};
    std::string_view text; // of an attribute or a type; both outlive the call
};

using Environment = std::vector<Value>; // by slot

// A value that a plan takes from the call: its kind and its slot.
struct Leaf
{
    enum class Source : uint8_t { kSize, kAttribute, kConstant, kCall, kHas, kDim };
    Source source{};
    std::string name;
    int axis{}; // for kDim
};

// Names available to expressions of one plan, and their slots: leaves first, then the plan's definitions.
class Scope
{
public:
    Scope(OpSpec const& spec, std::string where) : mSpec(&spec), mWhere(std::move(where)) {}

    [[noreturn]] void refuse(std::string const& why) const; // throws still::Error

    void allow_constants(std::vector<std::string> names) { mConstants = std::move(names); }
    size_t define(std::string const& name, ValueKind kind); // returns the slot; refuses a name that is taken
    void forget(std::string const& name) { mDefined.erase(name); }

    OpSpec const& spec() const { return *mSpec; }
    size_t slots() const { return mKinds.size(); }
    std::map<size_t, Leaf> const& leaves() const { return mLeaves; }

private:
    friend class ExpressionReader;
    size_t leaf(Leaf::Source source, std::string const& name, int axis, ValueKind kind);

    OpSpec const* mSpec;
    std::string mWhere;
    std::vector<std::string> mConstants;
    std::vector<ValueKind> mKinds; // by slot
    std::map<std::string, size_t> mDefined;
    std::map<size_t, Leaf> mLeaves;
};

class Expression
{
public:
    // Throws still::Error if the data is no expression of this kind; a real one may be an integer.
    Expression(Json const& data, Scope& scope, ValueKind kind);
    Expression(Json const& data, Scope& scope); // of any kind

    ValueKind kind() const { return mNodes.front().kind; }

    // Whether every name in the expression has a value.
    bool known(Environment const& environment) const;

    // Values. They throw still::Error for overflow, division by a non-positive number, and a name without a value.
    int64_t integer(Environment const& environment) const;
    double real(Environment const& environment) const;
    std::string_view text(Environment const& environment) const;
    Value value(Environment const& environment) const;
    std::string shown(Environment const& environment) const; // for messages and keys

private:
    friend class ExpressionReader;
    enum class Operator : uint8_t {
        kNumber, kText, kName,
        kAdd, kSubtract, kMultiply, kDivide, kModulo, kMin, kMax, kCeilDiv, kPow2, kRsqrt,
        kEqual, kUnequal, kLess, kAtMost, kMore, kAtLeast,
        kAnd, kOr, kNot, kIf,
    };
    struct Node
    {
        Operator op;
        ValueKind kind;
        size_t end;      // of the part that starts here
        int64_t integer; // a number, or the slot of a name
        std::string text;
    };

    int64_t integer_at(size_t at, Environment const& environment) const;
    double real_at(size_t at, Environment const& environment) const;
    std::string_view text_at(size_t at, Environment const& environment) const;
    bool compare(size_t at, Environment const& environment) const;
    Value const& named(size_t at, Environment const& environment) const;

    std::vector<Node> mNodes; // in prefix order
};

} // namespace still
