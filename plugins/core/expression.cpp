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

[[noreturn]] void overflow() { fail("a launch plan computes a number beyond 64 bits. Lower the batch or the tokens of a call."); }

int64_t positive(int64_t divisor)
{
    if (divisor <= 0)
        fail("a launch plan divides by ", divisor, ".");
    return divisor;
}

// b must be positive.
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
