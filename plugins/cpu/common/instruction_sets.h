// Every source of kernels is compiled once per instruction set; what a call uses is chosen here.
#pragma once

#include <cstddef>
#include <cstdint>

// Inlined by force: sources for different instruction sets include it, and the linker keeps one copy of what is not.
#define STILL_INLINE __attribute__((always_inline)) inline

namespace still_cpu
{

// The instruction sets that this library has and this processor can run, best first.
int count_instruction_sets();
char const* instruction_set_name(int index);

enum class InstructionSet
{
    v4,
    v3,
    i8mm,    // of 64-bit ARM, with SDOT
    dotprod, // SDOT alone
    baseline
};

InstructionSet instruction_set(int index);

// Rows of a state as the op keeps them: numbers, or 8 bits a number and a scale a row.
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

// What tensors hold: activations and states, or states that are narrower.
enum class Numbers
{
    kFloat,
    kHalf,
    kFloatKeptHalf, // float, with states of float16 where the op may have them
    kFloatKeptCodes // float, with such states in 8 bits
};

STILL_INLINE Numbers numbers(bool half, Cache cache = Cache::kAlike)
{
    return half                     ? Numbers::kHalf
           : cache == Cache::kHalf  ? Numbers::kFloatKeptHalf
           : cache == Cache::kCodes ? Numbers::kFloatKeptCodes
                                    : Numbers::kFloat;
}

// Instruction sets that kernels are compiled for, besides the baseline.
#if defined(STILL_X86)
#define STILL_EACH_SET(of) of(v4) of(v3)
#elif defined(STILL_ARM)
#define STILL_EACH_SET(of) of(i8mm) of(dotprod)
#else
#define STILL_EACH_SET(of)
#endif

// Declares an op's tables of `Kernels`, which its kernels.cpp defines, one per instruction set and kind of numbers, and `kernels_of`: those
// of the instruction set with this number among the ones that the processor can run, best first.
#define STILL_KERNEL_SETS                                                                                                              \
    STILL_EACH_SET(STILL_DECLARE) STILL_DECLARE(baseline)                                                                              \
    STILL_INLINE Kernels const& kernels_of(int index, Numbers kind)                                                                    \
    {                                                                                                                                  \
        switch (instruction_set(index))                                                                                                \
        {                                                                                                                              \
            STILL_EACH_SET(STILL_CASE)                                                                                                 \
        default: return baseline_kernels(kind);                                                                                        \
        }                                                                                                                              \
    }
#define STILL_DECLARE(set) Kernels const& set##_kernels(Numbers kind);
#define STILL_CASE(set) case InstructionSet::set: return set##_kernels(kind);

} // namespace still_cpu
