// Reads expressions from the archive's index; expression.cpp evaluates them.
#include "error.h"
#include "expression.h"
#include "json.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace still
{
namespace
{

constexpr size_t kMaxNodes = 256;
constexpr int kMaxDepth = 24;
constexpr size_t kMaxSlots = 4096;

} // namespace

// Converts one JSON value to nodes.
class ExpressionReader
{
public:
    ExpressionReader(Scope& scope, std::vector<Expression::Node>& nodes) : mScope(scope), mNodes(nodes) {}

    ValueKind read(Json const& data, int depth)
    {
        if (depth > kMaxDepth || mNodes.size() >= kMaxNodes)
            mScope.refuse("an expression is larger than the library takes");
        size_t const at = mNodes.size();
        mNodes.push_back({Operator::kNumber, ValueKind::kInteger, 0, 0, {}});
        if (data.is_number())
            mNodes[at].integer = integer_of(data);
        else
            list(items_of(data), at, depth);
        mNodes[at].end = mNodes.size();
        return mNodes[at].kind;
    }

private:
    using Operator = Expression::Operator;

    struct Shape // of an operator
    {
        Operator op;
        size_t parts;
        ValueKind kind;
    };

    static Shape const* shape_of(std::string const& name)
    {
        constexpr auto integer = ValueKind::kInteger;
        static std::map<std::string, Shape> const shapes{
            {"+", {Operator::kAdd, 2, integer}}, {"-", {Operator::kSubtract, 2, integer}}, {"*", {Operator::kMultiply, 2, integer}},
            {"//", {Operator::kDivide, 2, integer}}, {"%", {Operator::kModulo, 2, integer}}, {"min", {Operator::kMin, 2, integer}},
            {"max", {Operator::kMax, 2, integer}}, {"ceil_div", {Operator::kCeilDiv, 2, integer}}, {"pow2", {Operator::kPow2, 1, integer}},
            {"rsqrt", {Operator::kRsqrt, 1, ValueKind::kReal}}, {"and", {Operator::kAnd, 2, integer}}, {"or", {Operator::kOr, 2, integer}},
            {"not", {Operator::kNot, 1, integer}}, {"if", {Operator::kIf, 3, integer}}, {"==", {Operator::kEqual, 2, integer}},
            {"!=", {Operator::kUnequal, 2, integer}}, {"<", {Operator::kLess, 2, integer}}, {"<=", {Operator::kAtMost, 2, integer}},
            {">", {Operator::kMore, 2, integer}}, {">=", {Operator::kAtLeast, 2, integer}},
        };
        auto const found = shapes.find(name);
        return found == shapes.end() ? nullptr : &found->second;
    }

    void list(Json::array_t const& items, size_t at, int depth)
    {
        if (items.size() < 2)
            mScope.refuse("an expression lacks its parts");
        std::string const& name = text_of(items[0]);
        Shape const* const shape = shape_of(name);
        if (!shape)
            return leaf(items, name, at);
        parts(items, name, shape->parts);
        mNodes[at].op = shape->op;
        mNodes[at].kind = shape->kind;
        std::vector<ValueKind> kinds;
        for (size_t i = 1; i < items.size(); ++i)
            kinds.push_back(read(items[i], depth + 1));
        bool const chooses = shape->op == Operator::kIf, compares = shape->op >= Operator::kEqual && shape->op <= Operator::kAtLeast;
        for (size_t i = 0; i < kinds.size() && !compares; ++i)
            if (kinds[i] != ValueKind::kInteger && !(chooses && i))
                mScope.refuse(name + (chooses ? " takes an integer as its condition" : " takes integers"));
        if (!chooses && !compares)
            return;
        ValueKind const left = kinds[kinds.size() - 2], right = kinds.back();
        bool const texts = left == ValueKind::kText, ordered = compares && name != "==" && name != "!=";
        if (texts != (right == ValueKind::kText) || (texts && ordered))
            mScope.refuse(name + " has values of different types");
        if (chooses)
            mNodes[at].kind = left == right ? left : ValueKind::kReal;
    }

    void parts(Json::array_t const& items, std::string const& name, size_t count) const
    {
        if (items.size() != count + 1)
            mScope.refuse(name + " takes " + std::to_string(count) + " parts, got " + std::to_string(items.size() - 1));
    }

    void leaf(Json::array_t const& items, std::string const& source, size_t at)
    {
        parts(items, source, source == "dim" ? 2 : 1);
        std::string const& name = text_of(items[1]);
        if (source == "text")
        {
            mNodes[at] = {Operator::kText, ValueKind::kText, 0, 0, name};
            return;
        }
        size_t slot = 0;
        if (source == "value")
        {
            auto const found = mScope.mDefined.find(name);
            if (found == mScope.mDefined.end())
                mScope.refuse("the name " + name + " is not defined where it is used");
            slot = found->second;
        }
        else
            slot = outer(items, source, name);
        mNodes[at] = {Operator::kName, mScope.mKinds[slot], 0, static_cast<int64_t>(slot), {}};
    }

    size_t outer(Json::array_t const& items, std::string const& source, std::string const& name)
    {
        OpSpec const& spec = mScope.spec();
        if (source == "size" && has_symbol(spec, name))
            return mScope.leaf(Leaf::Source::kSize, name, 0, ValueKind::kInteger);
        if (source == "attribute")
            for (AttributeSpec const& attribute : spec.attributes)
                if (attribute.name == name)
                    return mScope.leaf(Leaf::Source::kAttribute, name, 0,
                        attribute.kind == AttributeKind::kInteger ? ValueKind::kInteger
                            : attribute.kind == AttributeKind::kFloat ? ValueKind::kReal
                                                                      : ValueKind::kText);
        auto const& constants = mScope.mConstants;
        if (source == "constant" && std::find(constants.begin(), constants.end(), name) != constants.end())
            return mScope.leaf(Leaf::Source::kConstant, name, 0, ValueKind::kInteger);
        if (source == "call" && (name == "tokens" || name == "rows"))
            return mScope.leaf(Leaf::Source::kCall, name, 0, ValueKind::kInteger);
        if (source == "call" && (name == "dtype" || name == "count_dtype"))
            return mScope.leaf(Leaf::Source::kCall, name, 0, ValueKind::kText);
        if (source == "has" || source == "dim")
            return tensor(items, source, name);
        mScope.refuse("the " + source + " " + name + " is unknown");
    }

    size_t tensor(Json::array_t const& items, std::string const& source, std::string const& name)
    {
        for (TensorSpec const& input : mScope.spec().inputs)
        {
            if (input.name != name && !(input.state && (input.name == "past_" + name || "present_" + input.name.substr(5) == name)))
                continue;
            if (source == "has")
                return mScope.leaf(Leaf::Source::kHas, input.name, 0, ValueKind::kInteger);
            int64_t const axis = integer_of(items[2]);
            if (axis < 0 || axis >= static_cast<int64_t>(input.shape.size()))
                mScope.refuse(name + " has no dimension " + std::to_string(axis));
            return mScope.leaf(Leaf::Source::kDim, input.name, static_cast<int>(axis), ValueKind::kInteger);
        }
        mScope.refuse("the tensor " + name + " is unknown");
    }

    static bool has_symbol(OpSpec const& spec, std::string const& symbol)
    {
        for (auto const* tensors : {&spec.inputs, &spec.outputs})
            for (TensorSpec const& tensor : *tensors)
                for (std::string const& dim : tensor.shape)
                    if (dim.substr(dim.rfind('*') + 1) == symbol)
                        return true;
        return false;
    }

    Scope& mScope;
    std::vector<Expression::Node>& mNodes;
};

void Scope::refuse(std::string const& why) const { fail(mWhere, ": ", why, ". Build the archive and the library from one version."); }

size_t Scope::define(std::string const& name, ValueKind kind)
{
    if (mKinds.size() >= kMaxSlots)
        refuse("it has more names than the library takes");
    if (!mDefined.emplace(name, mKinds.size()).second)
        refuse("the name " + name + " is defined twice");
    mKinds.push_back(kind);
    return mKinds.size() - 1;
}

size_t Scope::leaf(Leaf::Source source, std::string const& name, int axis, ValueKind kind)
{
    for (auto const& [slot, known] : mLeaves)
        if (known.source == source && known.name == name && known.axis == axis)
            return slot;
    if (mKinds.size() >= kMaxSlots)
        refuse("it has more names than the library takes");
    mKinds.push_back(kind);
    mLeaves[mKinds.size() - 1] = {source, name, axis};
    return mKinds.size() - 1;
}

Expression::Expression(Json const& data, Scope& scope)
{
    ExpressionReader(scope, mNodes).read(data, 0);
}

Expression::Expression(Json const& data, Scope& scope, ValueKind kind) : Expression(data, scope)
{
    if (this->kind() != kind && !(kind == ValueKind::kReal && this->kind() == ValueKind::kInteger))
        scope.refuse("an expression is of the wrong type");
}

} // namespace still
