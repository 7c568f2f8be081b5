// Every source of kernels is compiled once per instruction set; what a call uses is chosen here.
#pragma once

// Inlined by force: sources for different instruction sets include it, and the linker keeps one copy of what is not.
#define STILL_INLINE __attribute__((always_inline)) inline

namespace still_cpu
{

// The instruction sets that this library has and this processor can run, best first.
int count_instruction_sets();
char const* instruction_set_name(int index);

// An op's kernels for each instruction set; a table per element type. Null where the machine's kind has no such set.
template <typename Kernels>
struct KernelSets
{
    Kernels const& (*v4)(bool half);
    Kernels const& (*v3)(bool half);
    Kernels const& (*baseline)(bool half);
};

enum class InstructionSet
{
    kV4,
    kV3,
    kBaseline
};

InstructionSet instruction_set(int index);

// Those of the instruction set with this number among the ones that the processor can run, best first.
template <typename Kernels>
Kernels const& choose(KernelSets<Kernels> const& sets, int index, bool half)
{
    switch (instruction_set(index))
    {
    case InstructionSet::kV4: return sets.v4(half);
    case InstructionSet::kV3: return sets.v3(half);
    default: return sets.baseline(half);
    }
}

} // namespace still_cpu
