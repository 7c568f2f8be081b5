// Which of the compiled kernels this processor can run.
#include <algorithm>
#include <iterator>

#include "kernels.h"

namespace still_cpu
{
namespace
{

struct Set
{
    Kernels const& (*kernels)(bool half);
    bool (*runs)();
};

Set const kSets[] = {
#if defined(STILL_X86)
    {v4_kernels,
        []
        {
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
                   && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
        }},
    {v3_kernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"); }},
#endif
    {baseline_kernels, [] { return true; }},
};

Set const& set(int index)
{
    for (Set const& s : kSets)
        if (s.runs() && index-- == 0)
            return s;
    return kSets[std::size(kSets) - 1];
}

} // namespace

Kernels const& kernels_of(int instruction_set, bool half)
{
    return set(instruction_set).kernels(half);
}

int count_instruction_sets()
{
    return static_cast<int>(std::count_if(std::begin(kSets), std::end(kSets), [](Set const& s) { return s.runs(); }));
}

char const* instruction_set_name(int index)
{
    return set(index).kernels(false).name;
}

} // namespace still_cpu
