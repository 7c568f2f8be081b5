// A node and a call of it, checked against the OpSpec: attributes, shapes, counts. What all ops share; no host.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/op_spec.h"

namespace still_ort
{

// What is wrong with a node or a call: values, why, what to do.
struct Refused : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

// Every op of the library, from the generated header.
std::vector<still::OpSpec> const& specs();
// The op called `name`; its inputs must be `inputs`, in this order, which its kernel counts on.
still::OpSpec const& spec_with(char const* name, std::initializer_list<char const*> inputs);

// Reads a node's attributes: `integer(name, default)` and the like return the node's value or the default.
struct Attributes
{
    virtual ~Attributes() = default;
    virtual int64_t integer(char const* name, int64_t otherwise) const = 0;
    virtual float real(char const* name, float otherwise) const = 0;
    virtual std::string text(char const* name, std::string const& otherwise) const = 0;
};

// Place of the node's value among the attribute's choices; throws Refused for a value that is none of them.
int choice(still::OpSpec const& spec, Attributes const& attributes, char const* name);
// The node's value; throws Refused where it is less than `least` or beyond any use.
int64_t number(still::OpSpec const& spec, Attributes const& attributes, char const* name, int64_t least);

// Shapes of a call's inputs; an absent one has none, a scalar's is empty.
using Shapes = std::vector<std::optional<std::vector<int64_t>>>;
// Sizes by symbol; "WH" is the number of heads that weights have: H, or 1 for all.
using Symbols = std::map<std::string, int64_t>;

// The symbols' sizes; throws Refused where a shape contradicts the OpSpec or another one.
// `known` holds sizes that follow from attributes; `derive(symbol, size, known)` may add those that follow from one that was found.
Symbols read_symbols(still::OpSpec const& spec, Shapes const& shapes, Symbols known,
    std::function<void(std::string const&, int64_t, Symbols&)> const& derive = {});
// Throws Refused unless each of `symbols` is of use as a dimension of a model, H a multiple of HK, and B and N fit 32 bits.
void check_dimensions(still::OpSpec const& spec, Symbols const& known, std::initializer_list<char const*> symbols);

// The longest sequence: sums and products with it stay far from the end of 64 bits.
constexpr int64_t kMostTokens = int64_t{1} << 40;

// Throws Refused for a row whose counts are outside their range; afterwards their sum fits.
void check_range(still::OpSpec const& spec, int row, int64_t past, int64_t brought, int64_t tokens);

} // namespace still_ort
