// Type and shape of a tensor, as every adapter hands them to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace still
{

constexpr int kMaxRank = 8;

// The largest dimension: sums and products with a few others stay far from the end of 64 bits.
constexpr int64_t kMaxSize = int64_t{1} << 40;

// Values are part of the C ABI.
enum class Type : int32_t { kNone = 0, kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3, kInt32 = 4, kInt64 = 5 };

char const* type_name(Type type);
size_t type_bytes(Type type);

struct Tensor
{
    Type type{Type::kNone};
    int32_t rank{};
    int64_t dims[kMaxRank]{};

    bool operator==(Tensor const& other) const;
    std::string shape() const; // "[2, 64]"
    size_t bytes() const;      // throws still::Error where 64 bits do not count them
};

// Throws still::Error for more dimensions than kMaxRank, naming the tensor by `what`. A negative dimension is one not known yet.
template <typename Size>
Tensor make_tensor(Type type, Size const* dims, int64_t rank, std::string const& what);

} // namespace still
