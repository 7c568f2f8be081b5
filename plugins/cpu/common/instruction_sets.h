// Every source of kernels is compiled once per instruction set; what a call uses is chosen here.
#pragma once

#include "kept.h"

// Inlined by force: sources for different instruction sets include it, and the linker keeps one copy of what is not.
#define STILL_INLINE __attribute__((always_inline)) inline

namespace still_cpu
{

// The instruction sets that this library has and this processor can run, best first.
int count_instruction_sets();
char const* instruction_set_name(int index);

enum class InstructionSet
{
    kV4,
    kV3,
    kI8mm,    // of 64-bit ARM, with SDOT
    kDotprod, // SDOT alone
    kBaseline
};

InstructionSet instruction_set(int index);

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

// Declares an op's tables of `Kernels`, which its kernels.cpp defines, one per instruction set and kind of numbers, and `kernels_of`: those
// of the instruction set with this number among the ones that the processor can run, best first.
#if defined(STILL_X86)
#define STILL_KERNEL_SETS                                                                                                              \
    Kernels const& v4_kernels(Numbers kind);                                                                                           \
    Kernels const& v3_kernels(Numbers kind);                                                                                           \
    Kernels const& baseline_kernels(Numbers kind);                                                                                     \
    STILL_INLINE Kernels const& kernels_of(int index, Numbers kind)                                                                    \
    {                                                                                                                                  \
        switch (instruction_set(index))                                                                                                \
        {                                                                                                                              \
        case InstructionSet::kV4: return v4_kernels(kind);                                                                             \
        case InstructionSet::kV3: return v3_kernels(kind);                                                                             \
        default: return baseline_kernels(kind);                                                                                        \
        }                                                                                                                              \
    }
#elif defined(STILL_ARM)
#define STILL_KERNEL_SETS                                                                                                              \
    Kernels const& i8mm_kernels(Numbers kind);                                                                                         \
    Kernels const& dotprod_kernels(Numbers kind);                                                                                      \
    Kernels const& baseline_kernels(Numbers kind);                                                                                     \
    STILL_INLINE Kernels const& kernels_of(int index, Numbers kind)                                                                    \
    {                                                                                                                                  \
        switch (instruction_set(index))                                                                                                \
        {                                                                                                                              \
        case InstructionSet::kI8mm: return i8mm_kernels(kind);                                                                         \
        case InstructionSet::kDotprod: return dotprod_kernels(kind);                                                                   \
        default: return baseline_kernels(kind);                                                                                        \
        }                                                                                                                              \
    }
#else
#define STILL_KERNEL_SETS                                                                                                              \
    Kernels const& baseline_kernels(Numbers kind);                                                                                     \
    STILL_INLINE Kernels const& kernels_of(int, Numbers kind)                                                                          \
    {                                                                                                                                  \
        return baseline_kernels(kind);                                                                                                 \
    }
#endif

} // namespace still_cpu
