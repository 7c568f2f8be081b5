// Number types of states and activations (float, half, 8 bits), conversions for the arithmetic, and a task's memory. Compiled once
// per instruction set, like simd.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "instruction_sets.h"
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace
{

// Allocates from the task's room, 64-byte aligned.
struct Room
{
    float* next;

    float* take(int64_t n)
    {
        float* const taken = next;
        next += (n + 15) / 16 * 16;
        return taken;
    }
};

template <typename T>
T* at(void* base, int64_t index)
{
    return static_cast<T*>(base) + index;
}

template <typename T>
T const* at(void const* base, int64_t index)
{
    return static_cast<T const*>(base) + index;
}

struct Half
{
    uint16_t bits;
};

struct Code
{
    int8_t value; // value is this times its row's scale
};

inline float to_float(float x)
{
    return x;
}

inline void from_float(float x, float* out)
{
    *out = x;
}

#if defined(__F16C__)
inline float to_float(Half x)
{
    return _cvtsh_ss(x.bits);
}

inline void from_float(float x, Half* out)
{
    out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
inline float to_float(Half x)
{
    __fp16 h;
    std::memcpy(&h, &x, sizeof h);
    return h;
}

inline void from_float(float x, Half* out)
{
    __fp16 const h = static_cast<__fp16>(x);
    std::memcpy(out, &h, sizeof h);
}
#else
inline float to_float(Half x)
{
    // The exponent changes by 112. A product with a power of two handles denormals; infinities and NaN keep theirs.
    uint32_t const sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
    float value;
    uint32_t bits = rest;
    std::memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f; // 2^112
    std::memcpy(&bits, &value, sizeof bits);
    if ((x.bits & 0x7c00u) == 0x7c00u)
        bits = 0x7f800000u | (rest & 0x007fffffu);
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void from_float(float x, Half* out)
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    uint32_t const sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t half;
    if (bits > 0x7f800000u)
        half = 0x7e00u; // NaN
    else if (bits >= 0x477ff000u)
        half = 0x7c00u; // rounds to infinity
    else if (bits < 0x38800000u)
    {
        // Denormal: adding 0.5 leaves the rounded value in the sum's low bits.
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        std::memcpy(&half, &magnitude, sizeof half);
        half -= 0x3f000000u;
    }
    else
        half = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13;
    out->bits = static_cast<uint16_t>(sign | half);
}
#endif

// `rows` rows of n numbers as floats: the rows themselves, or a copy in `room`. Sets the stride of the result.
inline float const* floats(float const* x, int, int, int64_t stride, float*, int64_t& result_stride)
{
    result_stride = stride;
    return x;
}

inline float const* floats(Half const* x, int rows, int n, int64_t stride, float* room, int64_t& result_stride)
{
    result_stride = n;
    for (int r = 0; r < rows; ++r)
    {
        Half const* from = x + r * stride;
        float* to = room + static_cast<int64_t>(r) * n;
        int i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i const*>(from + i))));
#endif
        for (; i < n; ++i)
            to[i] = to_float(from[i]);
    }
    return room;
}

inline void halves(float const* x, int n, Half* out)
{
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i)
        from_float(x[i], out + i);
}

// A row of n numbers in 8 bits, by the rule of CACHE (graphs/still_graphs/spec.py). With an infinity or NaN the whole row reads as NaN.
inline void codes(float const* x, int n, Code* out, float* scale)
{
    constexpr float steps = 127, round = 12582912; // 1.5 * 2^23: floats near it are integers, halves round to even
    float most = 0, poison = 0;
    for (int i = 0; i < n; ++i)
    {
        most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
        poison += x[i] * 0.0f;
    }
    float const unit = most / steps, divisor = unit > 0 ? unit : 1;
    *scale = unit + poison;
    for (int i = 0; i < n; ++i)
    {
        float code = (x[i] / divisor + round) - round;
        code = code > -steps ? code : -steps; // also for NaN
        out[i].value = static_cast<int8_t>(code < steps ? code : steps);
    }
}

// `count` rows of n numbers of a state from row `row`, as floats: the rows themselves, or a copy in `room`.
template <typename S>
inline float const* kept_floats(still_cpu::Kept const& x, int64_t row, int count, int n, float* room, int64_t& stride)
{
    S const* const rows = static_cast<S const*>(x.rows) + row * n;
    if constexpr (std::is_same<S, Code>::value)
    {
        stride = n;
        for (int r = 0; r < count; ++r)
        {
            float const scale = x.scales[row + r];
            Code const* const from = rows + static_cast<int64_t>(r) * n;
            float* const to = room + static_cast<int64_t>(r) * n;
            for (int i = 0; i < n; ++i)
                to[i] = scale * static_cast<float>(from[i].value);
        }
        return room;
    }
    else
        return floats(rows, count, n, n, room, stride);
}

// Writes a row of a state from float activations.
template <typename S>
inline void keep(void const* from, int n, still_cpu::Kept const& to, int64_t row)
{
    float const* const x = static_cast<float const*>(from);
    S* const out = static_cast<S*>(to.rows) + row * n;
    if constexpr (std::is_same<S, Code>::value)
        codes(x, n, out, to.scales + row);
    else
        halves(x, n, out);
}

} // namespace
