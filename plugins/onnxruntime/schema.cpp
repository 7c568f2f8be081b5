#include "schema.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "../core/generated/op_specs.h"

namespace still_ort
{
namespace
{

std::string title(still::OpSpec const& spec)
{
    return spec.domain + "::" + spec.name + ": ";
}

std::string list(std::optional<std::vector<int64_t>> const& shape)
{
    if (!shape)
        return "absent";
    std::ostringstream out;
    out << "[";
    for (size_t i = 0; i < shape->size(); ++i)
        out << (i ? ", " : "") << (*shape)[i];
    out << "]";
    return out.str();
}

std::string expected(still::TensorSpec const& input, Symbols const& known)
{
    std::string text;
    for (std::string const& symbol : input.shape)
    {
        auto const value = known.find(symbol);
        text += (text.empty() ? "[" : ", ") + symbol + (value == known.end() ? "" : "=" + std::to_string(value->second));
    }
    return text + "]";
}

still::AttributeSpec const& attribute(still::OpSpec const& spec, char const* name)
{
    for (still::AttributeSpec const& a : spec.attributes)
        if (a.name == name)
            return a;
    throw std::logic_error(name);
}

int64_t size_of(Symbols const& known, char const* symbol)
{
    auto const found = known.find(symbol);
    return found == known.end() ? 0 : found->second;
}

} // namespace

std::vector<still::OpSpec> const& specs()
{
    static std::vector<still::OpSpec> const all = still::make_op_specs();
    return all;
}

still::OpSpec const& spec_with(char const* name, std::initializer_list<char const*> inputs)
{
    for (still::OpSpec const& spec : specs())
        if (spec.name == name)
        {
            bool const same = spec.version == 1
                              && std::equal(spec.inputs.begin(), spec.inputs.end(), inputs.begin(), inputs.end(),
                                  [](still::TensorSpec const& a, char const* b) { return a.name == b; });
            if (!same)
                throw std::logic_error("the OpSpec of " + spec.name + " is not what its kernel was written for");
            return spec;
        }
    throw std::logic_error(std::string("no OpSpec of ") + name);
}

int choice(still::OpSpec const& spec, Attributes const& attributes, char const* name)
{
    still::AttributeSpec const& a = attribute(spec, name);
    std::string const value = attributes.text(name, a.text);
    auto const found = std::find(a.choices.begin(), a.choices.end(), value);
    if (found != a.choices.end())
        return static_cast<int>(found - a.choices.begin());
    std::string known;
    for (std::string const& c : a.choices)
        known += (known.empty() ? "" : ", ") + c;
    throw Refused(
        title(spec) + name + "=\"" + value + "\" is unknown; known: " + known + ". Update the library, or run without it.");
}

int64_t number(still::OpSpec const& spec, Attributes const& attributes, char const* name, int64_t least)
{
    int64_t const value = attributes.integer(name, attribute(spec, name).integer);
    if (value < least || value > (1 << 24))
        throw Refused(title(spec) + name + "=" + std::to_string(value) + " is out of range.");
    return value;
}

Symbols read_symbols(still::OpSpec const& spec, Shapes const& shapes, Symbols known,
    std::function<void(std::string const&, int64_t, Symbols&)> const& derive)
{
    for (size_t i = 0; i < spec.inputs.size(); ++i)
    {
        still::TensorSpec const& input = spec.inputs[i];
        if (!shapes[i] && input.optional)
            continue;
        bool fits = shapes[i] && shapes[i]->size() == input.shape.size();
        for (size_t d = 0; fits && d < shapes[i]->size(); ++d)
        {
            std::string const& symbol = input.shape[d];
            int64_t const size = (*shapes[i])[d];
            if (size < 0 || size > kMostTokens)
                throw Refused(title(spec) + input.name + " is " + list(shapes[i]) + ": dimension " + symbol + " is out of range.");
            if (input.weight && symbol == "H" && input.shape.size() > 1)
            {
                fits = known.emplace("WH", size).first->second == size && (size == 1 || size == size_of(known, "H"));
                continue;
            }
            fits = known.emplace(symbol, size).first->second == size;
            if (derive)
                derive(symbol, size, known);
        }
        if (!fits)
            throw Refused(title(spec) + input.name + " is " + list(shapes[i]) + ", expected " + expected(input, known) + ".");
    }
    return known;
}

void check_dimensions(still::OpSpec const& spec, Symbols const& known, std::initializer_list<char const*> symbols)
{
    auto const refuse = [&](char const* symbol)
    {
        throw Refused(
            title(spec) + "dimension " + symbol + "=" + std::to_string(size_of(known, symbol)) + " is out of range.");
    };
    for (char const* symbol : symbols)
        if (size_of(known, symbol) < 1 || size_of(known, symbol) > 65536)
            refuse(symbol);
    for (char const* symbol : {"B", "N"}) // counted in 32 bits
        if (size_of(known, symbol) > std::numeric_limits<int32_t>::max())
            refuse(symbol);
    if (size_of(known, "H") % size_of(known, "HK"))
        throw Refused(title(spec) + std::to_string(size_of(known, "H")) + " query heads are no multiple of "
                      + std::to_string(size_of(known, "HK")) + ".");
}

void check_range(still::OpSpec const& spec, int row, int64_t past, int64_t brought, int64_t tokens)
{
    if (past < 0 || past > kMostTokens || brought < 0 || brought > tokens)
        throw Refused(title(spec) + "row " + std::to_string(row) + " has past_length " + std::to_string(past) + " and new_tokens "
                      + std::to_string(brought) + "; expected 0 to " + std::to_string(kMostTokens) + ", and new_tokens at most "
                      + std::to_string(tokens) + ".");
}

} // namespace still_ort
