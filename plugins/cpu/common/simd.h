// Vectors of the instruction set that a source file is compiled for, and basic loops.
//
// Everything is in an unnamed namespace and calls no template of the standard library: the same source is compiled once per
// instruction set, and the linker must not merge functions that were compiled for different ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace
{

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 8;
#else
constexpr int kLanes = 4, kTileRows = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));

constexpr float kMinusInfinity = -__builtin_huge_valf();

inline Vec load(float const* x)
{
    Vec v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

inline void store(float* x, Vec v)
{
    std::memcpy(x, &v, sizeof v);
}

inline Vec spread(float x)
{
    return x - Vec{};
}

// The first n < kLanes elements, the others `fill`.
inline Vec load_part(float const* x, int n, float fill)
{
    Vec v = spread(fill);
    std::memcpy(&v, x, sizeof(float) * static_cast<unsigned>(n));
    return v;
}

inline Vec larger(Vec a, Vec b)
{
    return a > b ? a : b;
}

inline float sum(Vec v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#elif defined(__AVX2__)
    __m256 const wide = reinterpret_cast<__m256>(v);
    __m128 const four = _mm_add_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
    __m128 const two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float x[kLanes];
    std::memcpy(x, &v, sizeof v);
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i)
            x[i] += x[i + half];
    return x[0];
#endif
}

inline float largest(Vec v)
{
    float x[kLanes];
    std::memcpy(x, &v, sizeof v);
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i)
            x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// e^x within 2e-7 of its value; 0 where the result would be denormal, finite above float's range.
// x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series of degree 7 leaves 5e-9; 2^n is added to the exponent's bits.
inline Vec exponential(Vec x)
{
    Vec const low = spread(-87.33f), high = spread(88.72f), shift = spread(12582912.0f); // 1.5 * 2^23: the sum's low bits are n
    VecInt const vanishes = x < low;
    x = vanishes ? low : x;
    x = x > high ? high : x;
    Vec const shifted = x * 1.44269504f + shift;
    Vec const n = shifted - shift;
    Vec const r = (x - n * 0.693359375f) - n * -2.12194440e-4f; // ln 2 in two parts, the first exact times n
    Vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    VecInt const scaled = reinterpret_cast<VecInt>(p) + (reinterpret_cast<VecInt>(shifted) << 23);
    return vanishes ? Vec{} : reinterpret_cast<Vec>(scaled);
}

inline float exponential(float x)
{
    return exponential(spread(x))[0];
}

// e^x to the last place of a float, for factors that are multiplied repeatedly.
inline float exact_exponential(double x)
{
    if (x < -87.33)
        return 0;
    double const shift = 6755399441055744.0; // 1.5 * 2^52
    double const shifted = (x > 88.72 ? 88.72 : x) * 1.4426950408889634 + shift, n = shifted - shift;
    double const r = (x > 88.72 ? 88.72 : x) - n * 0.6931471805599453;
    double p = 1;
    for (int i = 12; i; --i)
        p = 1 + p * r / i;
    int64_t bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits += static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(n)) << 52); // arbitrary for NaN
    std::memcpy(&p, &bits, sizeof bits);
    return static_cast<float>(p);
}

inline int round_up(int n, int unit)
{
    return (n + unit - 1) / unit * unit;
}

inline float largest(float const* x, int n)
{
    Vec most = spread(kMinusInfinity);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        most = larger(most, load(x + i));
    if (i < n)
        most = larger(most, load_part(x + i, n - i, kMinusInfinity));
    return largest(most);
}

// x := e^(x - m); returns the sum.
inline float exponentiate(float* x, int n, float m)
{
    Vec total = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
    {
        Vec const e = exponential(load(x + i) - m);
        total += e;
        store(x + i, e);
    }
    if (i < n)
    {
        Vec const e = exponential(load_part(x + i, n - i, kMinusInfinity) - m);
        total += e;
        std::memcpy(x + i, &e, sizeof(float) * static_cast<unsigned>(n - i));
    }
    return sum(total);
}

inline float sum_of_exponentials(float const* x, int n, float m)
{
    Vec total = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        total += exponential(load(x + i) - m);
    if (i < n)
        total += exponential(load_part(x + i, n - i, kMinusInfinity) - m);
    return sum(total);
}

inline void scale(float* x, int n, float factor)
{
    for (int i = 0; i < n; ++i)
        x[i] *= factor;
}

inline float dot(float const* a, float const* b, int n)
{
    Vec total = {}, second = {};
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes)
    {
        total += load(a + i) * load(b + i);
        second += load(a + i + kLanes) * load(b + i + kLanes);
    }
    for (; i + kLanes <= n; i += kLanes)
        total += load(a + i) * load(b + i);
    if (i < n)
        total += load_part(a + i, n - i, 0) * load_part(b + i, n - i, 0);
    return sum(total + second);
}

// out[r] = factor * (x . rows[r]), rows [count, n] dense.
inline void dots(float const* x, float const* rows, int count, int n, float factor, float* out)
{
    for (int r = 0; r < count; ++r)
        out[r] = factor * dot(x, rows + static_cast<int64_t>(r) * n, n);
}

template <int Width>
inline void add_weighted_part(float const* weight, float const* rows, int count, int64_t stride, float* out)
{
    Vec even[Width], odd[Width];
    for (int j = 0; j < Width; ++j)
        even[j] = load(out + j * kLanes), odd[j] = Vec{};
    int r = 0;
    for (; r + 2 <= count; r += 2)
        for (int j = 0; j < Width; ++j)
        {
            even[j] += weight[r] * load(rows + r * stride + j * kLanes);
            odd[j] += weight[r + 1] * load(rows + (r + 1) * stride + j * kLanes);
        }
    if (r < count)
        for (int j = 0; j < Width; ++j)
            even[j] += weight[r] * load(rows + r * stride + j * kLanes);
    for (int j = 0; j < Width; ++j)
        store(out + j * kLanes, even[j] + odd[j]);
}

// out[n] += sum over r of weight[r] * rows[r], rows [count, n] dense.
inline void add_weighted(float const* weight, float const* rows, int count, int n, float* out)
{
    int j = 0;
    for (; j + 4 * kLanes <= n; j += 4 * kLanes)
        add_weighted_part<4>(weight, rows + j, count, n, out + j);
    for (; j + kLanes <= n; j += kLanes)
        add_weighted_part<1>(weight, rows + j, count, n, out + j);
    if (j < n)
        for (int r = 0; r < count; ++r)
            for (int i = j; i < n; ++i)
                out[i] += weight[r] * rows[static_cast<int64_t>(r) * n + i];
}

} // namespace
