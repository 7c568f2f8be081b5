// Integer operations of 64-bit ARM for steps.h and tiles.h. Compiled once per instruction set: plain NEON, with dot products
// (SDOT), and with matrix products (USDOT and USMMLA, of the extension i8mm).
//
// Sums are exact in all three, and the other arithmetic is the same: the three give the same bits.
#pragma once

#include <arm_neon.h>

namespace
{

typedef int8x16_t Bytes;
typedef int32x4_t Sums;

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSigned = false; // codes
#else
constexpr bool kSigned = true;
#endif

inline Bytes load_bytes(int8_t const* x)
{
    return vld1q_s8(x);
}

// Adds the products of sixteen codes and numbers, in groups of four.
inline Sums plus_products(Sums sums, Bytes codes, Bytes x)
{
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sums, vreinterpretq_u8_s8(codes), x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, codes, x);
#else
    // Two 8-bit products fit 16 bits.
    return vpadalq_s16(sums, vmlal_high_s8(vmull_s8(vget_low_s8(codes), vget_low_s8(x)), codes, x));
#endif
}

// The codes of a unit of a row, by halves; 8-bit codes minus 128 if they are signed.
template <int Bits>
inline void load_codes(uint8_t const* codes, int, Bytes& first, Bytes& second)
{
    uint8x16_t const x = vld1q_u8(codes);
    if constexpr (Bits == 4)
        first = vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15))), second = vreinterpretq_s8_u8(vshrq_n_u8(x, 4));
    else
    {
        uint8x16_t const sign = vdupq_n_u8(kSigned ? 128 : 0);
        first = vreinterpretq_s8_u8(veorq_u8(x, sign)), second = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + 16), sign));
    }
}

template <int Bits>
inline Sums products(Bytes first, Bytes second, Bytes x, Bytes y)
{
    Sums less = vdupq_n_s32(0);
    if constexpr (Bits == 8 && kSigned)
        less = vshlq_n_s32(plus_products(plus_products(less, vdupq_n_s8(1), x), vdupq_n_s8(1), y), 7);
    return plus_products(plus_products(less, first, x), second, y);
}

inline Quads to_quads(Sums const* v)
{
    return (Quads)vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])));
}

inline Quads load_numbers(Half const* const* rows, int64_t unit, int)
{
    uint16x4_t found = vdup_n_u16(0);
    found = vld1_lane_u16(&rows[0][unit].bits, found, 0), found = vld1_lane_u16(&rows[1][unit].bits, found, 1);
    found = vld1_lane_u16(&rows[2][unit].bits, found, 2), found = vld1_lane_u16(&rows[3][unit].bits, found, 3);
    return (Quads)vcvt_f32_f16(vreinterpret_f16_u16(found));
}

inline Bytes low_halves(Bytes a, Bytes b)
{
    return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

inline Bytes high_halves(Bytes a, Bytes b)
{
    return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Codes of four rows in the layout of `pair_products`.
inline void pair_rows(Bytes* rows)
{
    for (int r = 0; r < 4; r += 2)
    {
        Bytes const low = low_halves(rows[r], rows[r + 1]);
        rows[r + 1] = high_halves(rows[r], rows[r + 1]);
        rows[r] = low;
    }
}

// Adds the products of eight codes of each of two rows and eight numbers of each of two tokens: a row's sums are neighbours.
inline Sums plus_pairs(Sums sums, Bytes codes, Bytes x)
{
    return vusmmlaq_s32(sums, vreinterpretq_u8_s8(codes), x);
}

// The sums of four rows for each of two tokens, `x` and the one `distance` after it.
inline void pair_products(Bytes const* first, Bytes const* second, int8_t const* x, int64_t distance, Quads* found)
{
    Sums top = vdupq_n_s32(0), bottom = top;
    Bytes const* const halves[] = {first, second};
    for (Bytes const* codes : halves)
    {
        Bytes const a = load_bytes(x), b = load_bytes(x + distance), low = low_halves(a, b), high = high_halves(a, b);
        top = plus_pairs(plus_pairs(top, codes[0], low), codes[1], high);
        bottom = plus_pairs(plus_pairs(bottom, codes[2], low), codes[3], high);
        x += 16;
    }
    found[0] = (Quads)vcvtq_f32_s32(vuzp1q_s32(top, bottom)), found[1] = (Quads)vcvtq_f32_s32(vuzp2q_s32(top, bottom));
}

#endif

// Four bytes, signed or not.
template <typename Byte>
inline Sums widened_four(uint8_t const* from)
{
    uint32_t bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    uint8x8_t const narrow = vreinterpret_u8_u32(vdup_n_u32(bytes));
    if constexpr (static_cast<Byte>(-1) < 0)
        return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(narrow))));
    else
        return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(narrow))));
}

// Sums of four outputs, a lane each, over `Groups` times four inputs; codes are ordered by output. Codes are below 64, and below 16 for
// more than sixteen inputs, so their products fit 16 bits.
template <int Groups, typename Codes>
inline Sums four_sums(Codes const* codes, int8_t const* x)
{
#if defined(__ARM_FEATURE_DOTPROD)
    Sums sums = vdupq_n_s32(0);
    for (int i = 0; i < Groups; i += 4)
    {
        Bytes const sixteen = load_bytes(x + 4 * i);
        sums = vdotq_laneq_s32(sums, (Bytes)codes[i], sixteen, 0);
        sums = vdotq_laneq_s32(sums, (Bytes)codes[i + 1], sixteen, 1);
        sums = vdotq_laneq_s32(sums, (Bytes)codes[i + 2], sixteen, 2);
        sums = vdotq_laneq_s32(sums, (Bytes)codes[i + 3], sixteen, 3);
    }
    return sums;
#else
    int16x8_t low = vdupq_n_s16(0), high = low;
    for (int i = 0; i < Groups; ++i)
    {
        int32_t four;
        std::memcpy(&four, x + 4 * i, sizeof four);
        Bytes const same = vreinterpretq_s8_s32(vdupq_n_s32(four)), own = (Bytes)codes[i];
        low = vmlal_s8(low, vget_low_s8(own), vget_low_s8(same)), high = vmlal_high_s8(high, own, same);
    }
    return vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// The same for two tokens, over codes with eight of an output in a row.
template <int Groups, typename Codes>
inline void pair_sums(Codes const* codes, int8_t const* x, int64_t distance, Sums* found)
{
    Sums top = vdupq_n_s32(0), bottom = top;
    for (int i = 0; i < Groups; i += 4, codes += 4, x += 16)
    {
        Bytes const a = load_bytes(x), b = load_bytes(x + distance), low = low_halves(a, b), high = high_halves(a, b);
        top = plus_pairs(plus_pairs(top, (Bytes)codes[0], low), (Bytes)codes[2], high);
        bottom = plus_pairs(plus_pairs(bottom, (Bytes)codes[1], low), (Bytes)codes[3], high);
    }
    found[0] = vuzp1q_s32(top, bottom), found[1] = vuzp2q_s32(top, bottom);
}

#endif

} // namespace
