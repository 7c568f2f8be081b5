// Rows of a state as the op keeps them: numbers, or 8 bits a number and a scale a row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace still_cpu
{

struct Kept
{
    void* rows{};
    float* scales{}; // of rows in 8 bits, else null
};

// What keys and values are kept as.
enum class Cache
{
    kAlike, // the activations' type
    kHalf,  // float16, beside float
    kCodes  // 8 bits, beside float
};

} // namespace still_cpu
