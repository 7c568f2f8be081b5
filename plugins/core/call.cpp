#include "call.h"

#include "error.h"

#include <algorithm>
#include <cctype>

namespace still
{
namespace
{

struct Dimension // factor * symbol / divisor
{
    int64_t factor{1};
    std::string symbol; // empty: the number `factor`
    int64_t divisor{1};

    bool fits(int64_t size) const { return size % divisor == 0; }
    int64_t of(int64_t size) const { return factor * size / divisor; }
};

Dimension parse_dimension(std::string const& text)
{
    size_t digits = 0;
    while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits])))
        ++digits;
    int64_t const factor = digits ? std::stoll(text.substr(0, digits)) : 1;
    size_t const begin = digits < text.size() && text[digits] == '*' ? digits + 1 : digits, slash = std::min(text.find('/'), text.size());
    int64_t const divisor = slash < text.size() ? std::stoll(text.substr(slash + 1)) : 1;
    return {factor, text.substr(begin, slash - begin), divisor};
}

std::string expected_shape(TensorSpec const& spec, std::map<std::string, int64_t> const& sizes)
{
    std::string text;
    for (std::string const& name : spec.shape)
    {
        Dimension const dim = parse_dimension(name);
        auto const known = sizes.find(dim.symbol);
        text += (text.empty() ? "" : ", ") + name;
        if (known != sizes.end())
            text += "=" + std::to_string(dim.of(known->second));
    }
    return "[" + text + "]";
}

Type concrete(TensorSpec const& spec, Call const& call)
{
    switch (spec.type)
    {
    case ElementType::kActivation: return spec.narrow ? call.kept : call.activation;
    case ElementType::kFloat32: return Type::kFloat32;
    case ElementType::kInteger: return call.count;
    case ElementType::kInt32: return Type::kInt32;
    }
    return Type::kNone;
}

} // namespace

int64_t Call::size(std::string const& symbol) const
{
    Dimension const dim = parse_dimension(symbol);
    auto const known = sizes.find(dim.symbol);
    if (known == sizes.end())
        refuse("no input that is given has the size " + dim.symbol + "; one that has it was left out.");
    return dim.of(known->second);
}

void Call::refuse(std::string const& what) const { fail(spec->name, ": ", what); }

// Reads the sizes of one tensor, or compares them with known ones.
void Call::bind_shape(TensorSpec const& given, Tensor const& tensor)
{
    std::map<std::string, int64_t> const before = sizes; // for messages: sizes from other tensors
    auto const demand = [&](bool fits, char const* why = "") {
        if (!fits)
            fail(spec->name, ": ", given.name, ": expected ", expected_shape(given, before), ", got ", tensor.shape(), why, ".");
    };
    demand(tensor.rank == static_cast<int32_t>(given.shape.size()));
    for (int axis = 0; axis < tensor.rank; ++axis)
    {
        Dimension const dim = parse_dimension(given.shape[static_cast<size_t>(axis)]);
        int64_t const size = tensor.dims[axis];
        demand(size >= 0, "; a dimension is still unknown");
        demand(size <= kMaxSize, "; a dimension is out of range");
        if (dim.symbol.empty())
        {
            demand(size == dim.factor);
            continue;
        }
        bool const shared = given.weight && axis == 0 && tensor.rank > 1;
        if (shared)
            demand(weights.emplace(dim.symbol, size).first->second == size, "; weights differ in what all heads share");
        auto const known = sizes.find(dim.symbol);
        if (known != sizes.end())
            demand((dim.fits(known->second) && size == dim.of(known->second)) || (shared && size == 1));
        else
        {
            demand(size % dim.factor == 0);
            sizes[dim.symbol] = size / dim.factor * dim.divisor;
        }
    }
    tensor.bytes(); // checks that the size fits
}

void Call::take_attributes()
{
    for (auto const& [name, value] : *attributes)
        if (value.kind == AttributeKind::kInteger)
            sizes[name] = value.integer;
}

void Call::bind(std::vector<Tensor> const& given)
{
    if (given.size() != inputs->size())
        fail(spec->name, ": expected ", inputs->size(), " inputs, got ", given.size(), ".");
    take_attributes();
    // Weights last: their dimension of 1 must not become the size of a symbol.
    for (bool const last : {false, true})
    {
        for (size_t i = 0; i < given.size(); ++i)
        {
            TensorSpec const& input = *(*inputs)[i];
            if (input.weight != last)
                continue;
            Tensor const& tensor = given[i];
            if (input.type == ElementType::kActivation && activation == Type::kNone)
            {
                if (tensor.type != Type::kFloat32 && tensor.type != Type::kFloat16 && tensor.type != Type::kBFloat16)
                    fail(spec->name, ": ", input.name, ": expected float16, bfloat16 or float32, got ", type_name(tensor.type), ".");
                activation = tensor.type;
            }
            if (input.type == ElementType::kInteger && count == Type::kNone)
            {
                if (tensor.type != Type::kInt32 && tensor.type != Type::kInt64)
                    fail(spec->name, ": ", input.name, ": expected int32 or int64, got ", type_name(tensor.type), ".");
                count = tensor.type;
            }
            if (input.narrow && kept == Type::kNone) // the first one sets the type of all
                kept = activation == Type::kFloat32 && tensor.type == Type::kFloat16 ? Type::kFloat16 : activation;
            if (Type const expected = concrete(input, *this); tensor.type != expected)
                fail(spec->name, ": ", input.name, ": expected ", type_name(expected), ", got ", type_name(tensor.type), ".");
            bind_shape(input, tensor);
            tensors[input.name] = tensor;
        }
    }
    if (knows("B") && knows("T"))
    {
        sizes["rows"] = size("B");
        if (__builtin_mul_overflow(size("B"), size("T"), &sizes["tokens"]))
            fail(spec->name, ": B=", size("B"), " times T=", size("T"), " tokens are more than 64 bits count.");
    }
    for (TensorSpec const* output : *outputs)
    {
        Tensor tensor;
        tensor.type = concrete(*output, *this);
        tensor.rank = static_cast<int32_t>(output->shape.size());
        for (int axis = 0; axis < tensor.rank; ++axis)
            tensor.dims[axis] = size(output->shape[static_cast<size_t>(axis)]);
        tensor.bytes();
        tensors[output->name] = tensor;
    }
}

} // namespace still
