// Type and shape of a tensor, as adapters pass them to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace still
{

constexpr int kMaxRank = 8;

// Largest dimension; sums and products with a few others do not overflow 64 bits.
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
    size_t bytes() const;      // throws still::Error if 64 bits overflow
};

// Throws still::Error for more dimensions than kMaxRank, with the tensor's name `what`. A negative dimension is unknown.
template <typename Size>
Tensor make_tensor(Type type, Size const* dims, int64_t rank, std::string const& what);

} // namespace still
