#include "tensor.h"

#include "error.h"

#include <algorithm>

namespace still
{

char const* type_name(Type type)
{
    switch (type)
    {
    case Type::kFloat32: return "float32";
    case Type::kFloat16: return "float16";
    case Type::kBFloat16: return "bfloat16";
    case Type::kInt32: return "int32";
    case Type::kInt64: return "int64";
    case Type::kNone: break;
    }
    return "nothing";
}

size_t type_bytes(Type type)
{
    switch (type)
    {
    case Type::kFloat16:
    case Type::kBFloat16: return 2;
    case Type::kFloat32:
    case Type::kInt32: return 4;
    case Type::kInt64: return 8;
    case Type::kNone: break;
    }
    return 0;
}

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
