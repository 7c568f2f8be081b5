// Every kernel source is compiled once per instruction set; a call's kernels are chosen here.
#pragma once

#include <cstddef>
#include <cstdint>

// Always inlined: sources for different instruction sets include it, and the linker keeps only one copy of other functions.
#define STILL_INLINE __attribute__((always_inline)) inline

namespace still_cpu
{

// Number of instruction sets that this library has and this processor can run, best first.
int count_instruction_sets();
char const* instruction_set_name(int index);

enum class InstructionSet
{
    v4,
    v3,
    i8mm,    // of 64-bit ARM, includes SDOT
    dotprod, // SDOT alone
    baseline
};

InstructionSet instruction_set(int index);

// Rows of a state: numbers, or 8 bits for each number and a scale for each row.
struct Kept
{
    void* rows{};
    float* scales{}; // for 8-bit rows, else null
};

// Storage of keys and values.
enum class Cache
{
    kAlike, // the activations' type
    kHalf,  // float16, with float activations
    kCodes  // 8 bits, with float activations
};

// Types of activations and states, or of narrower states.
enum class Numbers
{
    kFloat,
    kHalf,
    kFloatKeptHalf, // float, with float16 states where the op allows it
    kFloatKeptCodes // float, with such states in 8 bits
};

STILL_INLINE Numbers numbers(bool half, Cache cache = Cache::kAlike)
{
    return half                     ? Numbers::kHalf
           : cache == Cache::kHalf  ? Numbers::kFloatKeptHalf
           : cache == Cache::kCodes ? Numbers::kFloatKeptCodes
                                    : Numbers::kFloat;
}

// Compiled besides the baseline.
#if defined(STILL_X86)
#define STILL_EACH_SET(of) of(v4) of(v3)
#elif defined(STILL_ARM)
#define STILL_EACH_SET(of) of(i8mm) of(dotprod)
#else
#define STILL_EACH_SET(of)
#endif

// Declares an op's tables of `Kernels`, which its kernels.cpp defines, one per instruction set and kind of numbers; and `kernels_of`, which
// returns those of an instruction set by its number among those that the processor can run, best first.
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
