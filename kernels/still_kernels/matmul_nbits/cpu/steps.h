// Integer operations of the instruction set that a source file is compiled for: kStep units of four rows at a time. Compiled once per
// instruction set, like ../common/simd.h.
//
// Bytes hold a half of each unit of a step; Quads a number of each row for each unit, with the rows of a unit as neighbours.
#pragma once

#include "cpu/common/elements.h"
#include "cpu/common/simd.h"
#include "matmul_nbits.h"

namespace
{

typedef Vec Quads;
constexpr int kStep = kLanes / still_cpu::low_bit::kRows;

#if defined(__AVX512BW__)

constexpr int kMostTokens = 8;
typedef __m512i Bytes;
typedef __m512i Sums;

inline Bytes load_bytes(int8_t const* x)
{
    return _mm512_loadu_si512(x);
}

// The codes of `count` units of a row, by halves.
template <int Bits>
inline void load_codes(uint8_t const* codes, int count, Bytes& first, Bytes& second)
{
    if constexpr (Bits == 4)
    {
        Bytes const both = count == kStep ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi64((__mmask8)((1u << 2 * count) - 1), codes);
        Bytes const low = _mm512_set1_epi8(15);
        first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    else
    {
        unsigned const there = count == kStep ? 0xffffu : (1u << 4 * count) - 1;
        Bytes const x = _mm512_maskz_loadu_epi64((__mmask8)there, codes), y = _mm512_maskz_loadu_epi64((__mmask8)(there >> 8), codes + 64);
        first = _mm512_shuffle_i32x4(x, y, 0x88), second = _mm512_shuffle_i32x4(x, y, 0xdd);
    }
}

// Sums of products of codes and tokens, several per unit. An instruction of AVX-512 VNNI, which selects this set.
template <int Bits>
inline Sums products(Bytes first, Bytes second, Bytes x, Bytes y)
{
    Sums sums = _mm512_setzero_si512();
    asm("vpdpbusd %2, %1, %0\n\tvpdpbusd %4, %3, %0" : "+&v"(sums) : "v"(first), "v"(x), "v"(second), "v"(y));
    return sums;
}

inline Quads to_quads(Sums const* v)
{
    Sums const a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    Sums const b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)));
}

// Numbers of `count` units.
inline Quads load_numbers(Half const* const* rows, int64_t unit, int count)
{
    auto const some = [=](int r)
    {
        Half const* const from = rows[r] + unit;
        return count == kStep ? _mm_loadl_epi64((__m128i const*)from) : _mm_maskz_loadu_epi16((__mmask8)((1u << count) - 1), from);
    };
    __m128i const a = _mm_unpacklo_epi16(some(0), some(1)), b = _mm_unpacklo_epi16(some(2), some(3));
    return _mm512_cvtph_ps(_mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b)));
}

inline Quads load_numbers(float const* const* rows, int64_t unit, int count)
{
    // No mask for whole steps: it takes four times as long from memory.
    auto const there = (__mmask8)((1u << count) - 1);
    auto const some = [=](int r) { return count == kStep ? _mm_loadu_ps(rows[r] + unit) : _mm_maskz_loadu_ps(there, rows[r] + unit); };
    __m128 a = some(0), b = some(1), c = some(2), d = some(3);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set_m128(b, a)), _mm256_set_m128(d, c), 1);
}

// Fields of `Bits`; a word has those of a row.
template <int Bits>
inline Quads from_codes(uint32_t const* rows)
{
    __m512i const all = _mm512_broadcast_i32x4(_mm_set_epi32((int)rows[3], (int)rows[2], (int)rows[1], (int)rows[0]));
    __m512i const places
        = _mm512_mullo_epi32(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0), _mm512_set1_epi32(Bits));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(all, places), _mm512_set1_epi32((1 << Bits) - 1)));
}

// The sums of the rows.
inline void sum_quads(Quads x, float* rows)
{
    __m256 const half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    _mm_storeu_ps(rows, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__)

constexpr int kMostTokens = 8;
typedef __m256i Bytes;
typedef __m256i Sums;

inline Bytes load_bytes(int8_t const* x)
{
    return _mm256_loadu_si256((__m256i const*)x);
}

inline Bytes load_some(uint8_t const* x, bool whole)
{
    return whole ? load_bytes((int8_t const*)x) : _mm256_zextsi128_si256(_mm_loadu_si128((__m128i const*)x));
}

template <int Bits>
inline void load_codes(uint8_t const* codes, int count, Bytes& first, Bytes& second)
{
    if constexpr (Bits == 4)
    {
        Bytes const both = load_some(codes, count == kStep), low = _mm256_set1_epi8(15);
        first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    else
    {
        Bytes const x = load_bytes((int8_t const*)codes), y = count == kStep ? load_bytes((int8_t const*)codes + 32) : Bytes{};
        first = _mm256_permute2x128_si256(x, y, 0x20), second = _mm256_permute2x128_si256(x, y, 0x31);
    }
}

// For codes below 16: four products fit 16 bits.
inline Sums small_products(Bytes first, Bytes second, Bytes x, Bytes y)
{
    return _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(first, x), _mm256_maddubs_epi16(second, y)), _mm256_set1_epi16(1));
}

template <int Bits>
inline Sums products(Bytes first, Bytes second, Bytes x, Bytes y)
{
    if constexpr (Bits == 4)
        return small_products(first, second, x, y);
    Bytes const low = _mm256_set1_epi8(15);
    auto const high = [=](Bytes codes) { return _mm256_and_si256(_mm256_srli_epi16(codes, 4), low); };
    Sums const less = small_products(_mm256_and_si256(first, low), _mm256_and_si256(second, low), x, y);
    return _mm256_add_epi32(_mm256_slli_epi32(small_products(high(first), high(second), x, y), 4), less);
}

inline Quads to_quads(Sums const* v)
{
    return _mm256_cvtepi32_ps(_mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3])));
}

inline Quads load_numbers(Half const* const* rows, int64_t unit, int count)
{
    auto const some = [=](int r)
    {
        int32_t both = 0;
        if (count == kStep)
            std::memcpy(&both, rows[r] + unit, sizeof both);
        else
            both = rows[r][unit].bits;
        return _mm_cvtsi32_si128(both);
    };
    __m128i const a = _mm_unpacklo_epi16(some(0), some(1)), b = _mm_unpacklo_epi16(some(2), some(3));
    return _mm256_cvtph_ps(_mm_unpacklo_epi32(a, b));
}

inline Quads load_numbers(float const* const* rows, int64_t unit, int count)
{
    auto const some = [=](int64_t u) { return _mm_set_ps(rows[3][u], rows[2][u], rows[1][u], rows[0][u]); };
    return _mm256_set_m128(count == kStep ? some(unit + 1) : __m128{}, some(unit));
}

template <int Bits>
inline Quads from_codes(uint32_t const* rows)
{
    __m256i const all = _mm256_broadcastsi128_si256(_mm_set_epi32((int)rows[3], (int)rows[2], (int)rows[1], (int)rows[0]));
    __m256i const places = _mm256_set_epi32(Bits, Bits, Bits, Bits, 0, 0, 0, 0);
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(all, places), _mm256_set1_epi32((1 << Bits) - 1)));
}

inline void sum_quads(Quads x, float* rows)
{
    _mm_storeu_ps(rows, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

#else

#if defined(__aarch64__) // its integers are in neon.h
constexpr int kMostTokens = 8;
#else
constexpr int kMostTokens = 4;
typedef int16_t Bytes __attribute__((vector_size(32))); // two products fit 16 bits
typedef int32_t Sums __attribute__((vector_size(64)));

template <typename T>
inline Bytes widen(T const* x)
{
    typedef T Narrow __attribute__((vector_size(16)));
    Narrow narrow;
    std::memcpy(&narrow, x, sizeof narrow);
    return __builtin_convertvector(narrow, Bytes);
}

inline Bytes load_bytes(int8_t const* x)
{
    return widen(x);
}

template <int Bits>
inline void load_codes(uint8_t const* codes, int, Bytes& first, Bytes& second)
{
    Bytes const x = widen(codes);
    if constexpr (Bits == 4)
        first = x & 15, second = x >> 4;
    else
        first = x, second = widen(codes + 16);
}

template <int>
inline Sums products(Bytes first, Bytes second, Bytes x, Bytes y)
{
    return __builtin_convertvector(first * x, Sums) + __builtin_convertvector(second * y, Sums);
}

inline Quads to_quads(Sums const* v)
{
    Quads found;
    for (int r = 0; r < still_cpu::low_bit::kRows; ++r)
    {
        int32_t total = 0;
        for (int i = 0; i < 16; ++i)
            total += v[r][i];
        found[r] = static_cast<float>(total);
    }
    return found;
}

#endif

template <typename S>
inline Quads load_numbers(S const* const* rows, int64_t unit, int)
{
    Quads found;
    for (int r = 0; r < still_cpu::low_bit::kRows; ++r)
        found[r] = to_float(rows[r][unit]);
    return found;
}

template <int>
inline Quads from_codes(uint32_t const* rows)
{
    return Quads{static_cast<float>(rows[0]), static_cast<float>(rows[1]), static_cast<float>(rows[2]), static_cast<float>(rows[3])};
}

inline void sum_quads(Quads x, float* rows)
{
    std::memcpy(rows, &x, sizeof x);
}

#endif

} // namespace

#if defined(__aarch64__)
#include "neon.h"
#endif
