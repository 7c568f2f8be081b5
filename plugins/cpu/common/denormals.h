// Numbers too small for float's exponent.
#pragma once

#if defined(STILL_X86)
#include <xmmintrin.h>
#endif

namespace still_cpu
{

// While it lives, this thread's results that would be denormal are zero. On x86 an instruction that meets such a number takes some
// hundred cycles, and states that decay fill up with them. What is read stays as it is: half precision has its own.
class NoDenormals
{
public:
#if defined(STILL_X86)
    NoDenormals() : mBefore(_mm_getcsr()) { _mm_setcsr(mBefore | _MM_FLUSH_ZERO_ON); }
    ~NoDenormals() { _mm_setcsr(mBefore); }
#else
    NoDenormals() {} // Arm's cores compute with them at no cost.
#endif
    NoDenormals(NoDenormals const&) = delete;
    NoDenormals& operator=(NoDenormals const&) = delete;

#if defined(STILL_X86)
private:
    unsigned mBefore;
#endif
};

} // namespace still_cpu
