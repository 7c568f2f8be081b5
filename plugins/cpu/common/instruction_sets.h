// Every source of kernels is compiled once per instruction set; what a call uses is chosen here.
#pragma once

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
    kBaseline
};

InstructionSet instruction_set(int index);

// Declares an op's tables of `Kernels`, which its kernels.cpp defines, one per instruction set and element type, and `kernels_of`: those
// of the instruction set with this number among the ones that the processor can run, best first.
#if defined(STILL_X86)
#define STILL_KERNEL_SETS                                                                                                              \
    Kernels const& v4_kernels(bool half);                                                                                              \
    Kernels const& v3_kernels(bool half);                                                                                              \
    Kernels const& baseline_kernels(bool half);                                                                                        \
    STILL_INLINE Kernels const& kernels_of(int index, bool half)                                                                       \
    {                                                                                                                                  \
        switch (instruction_set(index))                                                                                                \
        {                                                                                                                              \
        case InstructionSet::kV4: return v4_kernels(half);                                                                             \
        case InstructionSet::kV3: return v3_kernels(half);                                                                             \
        default: return baseline_kernels(half);                                                                                        \
        }                                                                                                                              \
    }
#else
#define STILL_KERNEL_SETS                                                                                                              \
    Kernels const& baseline_kernels(bool half);                                                                                        \
    STILL_INLINE Kernels const& kernels_of(int, bool half)                                                                             \
    {                                                                                                                                  \
        return baseline_kernels(half);                                                                                                 \
    }
#endif

} // namespace still_cpu
