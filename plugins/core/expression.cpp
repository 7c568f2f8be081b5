#include "expression.h"

#include "error.h"

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

[[noreturn]] void overflow() { fail("a launch plan computes a number beyond 64 bits. Lower the batch or the tokens of a call."); }

int64_t positive(int64_t divisor)
{
    if (divisor <= 0)
        fail("a launch plan divides by ", divisor, ".");
    return divisor;
}

// These take a positive b.
int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
int64_t floor_mod(int64_t a, int64_t b) { return a % b + (a % b < 0 ? b : 0); }
int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

int64_t pow2(int64_t n)
{
    int64_t power = 1;
    while (power < n)
        if (__builtin_mul_overflow(power, 2, &power))
            overflow();
    return power;
}

} // namespace

enum class Expression::Operator : uint8_t {
    kNumber, kText, kName,
    kAdd, kSubtract, kMultiply, kDivide, kModulo, kMin, kMax, kCeilDiv, kPow2, kRsqrt,
    kEqual, kUnequal, kLess, kAtMost, kMore, kAtLeast,
    kAnd, kOr, kNot, kIf,
};

// Turns one JSON value into nodes.
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
        if (data.kind() == Json::Kind::kNumber)
            mNodes[at].integer = data.integer();
        else
            list(data.items(), at, depth);
        mNodes[at].end = mNodes.size();
        return mNodes[at].kind;
    }

private:
    using Operator = Expression::Operator;

    struct Shape // of an operator on integers
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
            {"not", {Operator::kNot, 1, integer}},
        };
        auto const found = shapes.find(name);
        return found == shapes.end() ? nullptr : &found->second;
    }

    void list(std::vector<Json> const& items, size_t at, int depth)
    {
        if (items.size() < 2)
            mScope.refuse("an expression lacks its parts");
        std::string const& name = items[0].string();
        if (Shape const* const shape = shape_of(name))
        {
            parts(items, name, shape->parts);
            mNodes[at].op = shape->op;
            for (size_t i = 1; i < items.size(); ++i)
                if (read(items[i], depth + 1) != ValueKind::kInteger)
                    mScope.refuse(name + " takes integers");
            mNodes[at].kind = shape->kind;
        }
        else if (compares(name, at))
        {
            parts(items, name, 2);
            ValueKind const left = read(items[1], depth + 1);
            ValueKind const right = read(items[2], depth + 1);
            bool const texts = left == ValueKind::kText;
            if (texts != (right == ValueKind::kText) || (texts && name != "==" && name != "!="))
                mScope.refuse(name + " compares values of different types");
        }
        else if (name == "if")
        {
            parts(items, name, 3);
            mNodes[at].op = Operator::kIf;
            if (read(items[1], depth + 1) != ValueKind::kInteger)
                mScope.refuse("if takes an integer as its condition");
            ValueKind const left = read(items[2], depth + 1);
            ValueKind const right = read(items[3], depth + 1);
            if ((left == ValueKind::kText) != (right == ValueKind::kText))
                mScope.refuse("the two sides of if are of different types");
            mNodes[at].kind = left == right ? left : ValueKind::kReal;
        }
        else
            leaf(items, name, at);
    }

    bool compares(std::string const& name, size_t at)
    {
        static std::map<std::string, Operator> const operators{{"==", Operator::kEqual}, {"!=", Operator::kUnequal},
            {"<", Operator::kLess}, {"<=", Operator::kAtMost}, {">", Operator::kMore}, {">=", Operator::kAtLeast}};
        auto const found = operators.find(name);
        if (found != operators.end())
            mNodes[at].op = found->second;
        return found != operators.end();
    }

    void parts(std::vector<Json> const& items, std::string const& name, size_t count) const
    {
        if (items.size() != count + 1)
            mScope.refuse(name + " takes " + std::to_string(count) + " parts, got " + std::to_string(items.size() - 1));
    }

    void leaf(std::vector<Json> const& items, std::string const& source, size_t at)
    {
        parts(items, source, source == "dim" ? 2 : 1);
        std::string const& name = items[1].string();
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

    size_t outer(std::vector<Json> const& items, std::string const& source, std::string const& name)
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
        if (source == "call" && (name == "tokens" || name == "rows" || name == "packed"))
            return mScope.leaf(Leaf::Source::kCall, name, 0, ValueKind::kInteger);
        if (source == "call" && (name == "dtype" || name == "count_dtype"))
            return mScope.leaf(Leaf::Source::kCall, name, 0, ValueKind::kText);
        if (source == "has" || source == "dim")
            return tensor(items, source, name);
        mScope.refuse("the " + source + " " + name + " is unknown");
    }

    size_t tensor(std::vector<Json> const& items, std::string const& source, std::string const& name)
    {
        for (TensorSpec const& input : mScope.spec().inputs)
        {
            if (input.name != name && !(input.state && (input.name == "past_" + name || "present_" + input.name.substr(5) == name)))
                continue;
            if (source == "has")
                return mScope.leaf(Leaf::Source::kHas, input.name, 0, ValueKind::kInteger);
            int64_t const axis = items[2].integer();
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

bool Expression::known(Environment const& environment) const
{
    return std::all_of(mNodes.begin(), mNodes.end(), [&](Node const& node) {
        return node.op != Operator::kName || environment[static_cast<size_t>(node.integer)].known;
    });
}

int64_t Expression::integer(Environment const& environment) const { return integer_at(0, environment); }
double Expression::real(Environment const& environment) const { return real_at(0, environment); }
std::string_view Expression::text(Environment const& environment) const { return text_at(0, environment); }

Value Expression::value(Environment const& environment) const
{
    switch (kind())
    {
    case ValueKind::kInteger: return {true, integer(environment), 0.0, {}};
    case ValueKind::kReal: return {true, 0, real(environment), {}};
    case ValueKind::kText: break;
    }
    return {true, 0, 0.0, text(environment)};
}

std::string Expression::shown(Environment const& environment) const
{
    switch (kind())
    {
    case ValueKind::kInteger: return std::to_string(integer(environment));
    case ValueKind::kReal: return std::to_string(real(environment));
    case ValueKind::kText: break;
    }
    return std::string(text(environment));
}

Value const& Expression::named(size_t at, Environment const& environment) const
{
    Value const& value = environment[static_cast<size_t>(mNodes[at].integer)];
    if (!value.known)
        fail("a launch plan asks for something that the call does not tell.");
    return value;
}

bool Expression::compare(size_t at, Environment const& environment) const
{
    Operator const op = mNodes[at].op;
    size_t const left = at + 1;
    size_t const right = mNodes[left].end;
    auto const decide = [op](auto const& a, auto const& b) {
        switch (op)
        {
        case Operator::kEqual: return a == b;
        case Operator::kUnequal: return a != b;
        case Operator::kLess: return a < b;
        case Operator::kAtMost: return a <= b;
        case Operator::kMore: return a > b;
        default: return a >= b;
        }
    };
    if (mNodes[left].kind == ValueKind::kText)
        return decide(text_at(left, environment), text_at(right, environment));
    if (mNodes[left].kind == ValueKind::kReal || mNodes[right].kind == ValueKind::kReal)
        return decide(real_at(left, environment), real_at(right, environment));
    return decide(integer_at(left, environment), integer_at(right, environment));
}

int64_t Expression::integer_at(size_t at, Environment const& environment) const
{
    Node const& node = mNodes[at];
    size_t const left = at + 1;
    auto const first = [&] { return integer_at(left, environment); };
    auto const second = [&] { return integer_at(mNodes[left].end, environment); };
    int64_t result = 0;
    switch (node.op)
    {
    case Operator::kNumber: return node.integer;
    case Operator::kName: return named(at, environment).integer;
    case Operator::kAdd:
        if (__builtin_add_overflow(first(), second(), &result))
            overflow();
        return result;
    case Operator::kSubtract:
        if (__builtin_sub_overflow(first(), second(), &result))
            overflow();
        return result;
    case Operator::kMultiply:
        if (__builtin_mul_overflow(first(), second(), &result))
            overflow();
        return result;
    case Operator::kDivide: return floor_div(first(), positive(second()));
    case Operator::kModulo: return floor_mod(first(), positive(second()));
    case Operator::kMin: return std::min(first(), second());
    case Operator::kMax: return std::max(first(), second());
    case Operator::kCeilDiv: return ceil_div(first(), positive(second()));
    case Operator::kPow2: return pow2(first());
    case Operator::kAnd: return first() && second();
    case Operator::kOr: return first() || second();
    case Operator::kNot: return !first();
    case Operator::kIf: return integer_at(first() ? mNodes[left].end : mNodes[mNodes[left].end].end, environment);
    default: return compare(at, environment);
    }
}

double Expression::real_at(size_t at, Environment const& environment) const
{
    Node const& node = mNodes[at];
    if (node.kind == ValueKind::kInteger)
        return static_cast<double>(integer_at(at, environment));
    if (node.op == Operator::kName)
        return named(at, environment).real;
    int64_t const first = integer_at(at + 1, environment);
    if (node.op == Operator::kRsqrt)
        return std::pow(static_cast<double>(positive(first)), -0.5);
    size_t const then = mNodes[at + 1].end;
    return real_at(first ? then : mNodes[then].end, environment);
}

std::string_view Expression::text_at(size_t at, Environment const& environment) const
{
    Node const& node = mNodes[at];
    if (node.op == Operator::kText)
        return node.text;
    if (node.op == Operator::kName)
        return named(at, environment).text;
    size_t const then = mNodes[at + 1].end;
    return text_at(integer_at(at + 1, environment) ? then : mNodes[then].end, environment);
}

} // namespace still
