// Selects the compiled kernels that this processor can run.
#include "instruction_sets.h"

#include <algorithm>
#include <iterator>

#if defined(STILL_ARM)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace still_cpu
{
namespace
{

struct Set
{
    InstructionSet set;
    char const* name;
    bool (*runs)();
};

Set const kSets[] = {
#if defined(STILL_X86)
    {InstructionSet::v4, "v4",
        []
        {
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
                   && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
        }},
    {InstructionSet::v3, "v3",
        [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"); }},
#elif defined(STILL_ARM)
    {InstructionSet::i8mm, "i8mm", [] { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM); }},
    {InstructionSet::dotprod, "dotprod", [] { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }},
#endif
    {InstructionSet::baseline, "baseline", [] { return true; }},
};

Set const& set(int index)
{
    for (Set const& s : kSets)
        if (s.runs() && index-- == 0)
            return s;
    return kSets[std::size(kSets) - 1];
}

} // namespace

InstructionSet instruction_set(int index)
{
    return set(index).set;
}

int count_instruction_sets()
{
    return static_cast<int>(std::count_if(std::begin(kSets), std::end(kSets), [](Set const& s) { return s.runs(); }));
}

char const* instruction_set_name(int index)
{
    return set(index).name;
}

} // namespace still_cpu
