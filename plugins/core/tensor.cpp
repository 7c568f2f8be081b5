#include "tensor.h"

#include "error.h"

#include <algorithm>
#include <iterator>

namespace still
{

namespace
{

struct TypeSpec // by Type
{
    char const* name;
    size_t bytes;
};
constexpr TypeSpec kTypes[] = {{"nothing", 0}, {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int32", 4}, {"int64", 8}};

TypeSpec const& spec_of(Type type)
{
    auto const place = static_cast<size_t>(type);
    return kTypes[place < std::size(kTypes) ? place : 0]; // hosts of the C ABI may pass any number
}

} // namespace

char const* type_name(Type type) { return spec_of(type).name; }
size_t type_bytes(Type type) { return spec_of(type).bytes; }

bool Tensor::operator==(Tensor const& other) const
{
    return type == other.type && rank == other.rank && std::equal(dims, dims + rank, other.dims);
}

std::string Tensor::shape() const
{
    std::string text;
    for (int axis = 0; axis < rank; ++axis)
        text += (axis ? ", " : "") + std::to_string(dims[axis]);
    return "[" + text + "]";
}

size_t Tensor::bytes() const
{
    if (std::find(dims, dims + rank, 0) != dims + rank)
        return 0;
    auto count = static_cast<int64_t>(type_bytes(type));
    for (int axis = 0; axis < rank; ++axis)
        if (__builtin_mul_overflow(count, dims[axis], &count) || count < 0)
            fail("a tensor of ", shape(), " has more bytes than 63 bits count.");
    return static_cast<size_t>(count);
}

template <typename Size>
Tensor make_tensor(Type type, Size const* dims, int64_t rank, std::string const& what)
{
    if (rank < 0 || rank > kMaxRank)
        fail(what, ": rank ", rank, " is outside 0..", kMaxRank, ".");
    Tensor tensor;
    tensor.type = type;
    tensor.rank = static_cast<int32_t>(rank);
    std::copy(dims, dims + rank, tensor.dims);
    return tensor;
}

template Tensor make_tensor(Type, int32_t const*, int64_t, std::string const&);
template Tensor make_tensor(Type, int64_t const*, int64_t, std::string const&);

} // namespace still
