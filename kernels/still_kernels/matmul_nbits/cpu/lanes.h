// Outputs in a vector's lanes, for up to kMostLanes tokens. Compiled for AVX2 and AVX-512, over steps.h.
//
// A step's codes are transposed and unpacked once for all tokens, and a token's products need no sums across lanes. With AVX2 256 4-bit
// products take 20 instructions, by rows 29. Sums of a unit are exact, and units are summed separately by their place in a step, like
// the parts of Quads: the result has the bits of `tile`.
#pragma once

namespace
{

#if defined(__AVX512BW__)
constexpr int kLeastLanes = 8; // tokens, below which transposing costs more
#else
constexpr int kLeastLanes = 2;
#endif
constexpr int kMostLanes = 64, kLaneRows = kStep * kRows;
static_assert(kMostLanes <= 8 * sizeof(Marks));

// Transposes dwords of 16 bytes of kLaneRows rows: for each place one of every row.
inline void turn_rows(uint8_t const* const* rows, int64_t byte, Bytes* to)
{
    auto const some = [=](int r) { return _mm_loadu_si128(reinterpret_cast<__m128i const*>(rows[r] + byte)); };
#if defined(__AVX512BW__)
    auto const all = [=](int r)
    {
        __m256i const low = _mm256_set_m128i(some(r + kRows), some(r)), high = _mm256_set_m128i(some(r + 3 * kRows), some(r + 2 * kRows));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    Bytes const a = all(0), b = all(1), c = all(2), d = all(3);
    Bytes const ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    Bytes const ab_high = _mm512_unpackhi_epi32(a, b), cd_high = _mm512_unpackhi_epi32(c, d);
    to[0] = _mm512_unpacklo_epi64(ab, cd), to[1] = _mm512_unpackhi_epi64(ab, cd);
    to[2] = _mm512_unpacklo_epi64(ab_high, cd_high), to[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
#else
    auto const both = [=](int r) { return _mm256_set_m128i(some(r + kRows), some(r)); };
    Bytes const a = both(0), b = both(1), c = both(2), d = both(3);
    Bytes const ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    Bytes const ab_high = _mm256_unpackhi_epi32(a, b), cd_high = _mm256_unpackhi_epi32(c, d);
    to[0] = _mm256_unpacklo_epi64(ab, cd), to[1] = _mm256_unpackhi_epi64(ab, cd);
    to[2] = _mm256_unpacklo_epi64(ab_high, cd_high), to[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
#endif
}

// Transposes numbers of four rows and each unit of a step to those of each unit and all rows.
inline void turn_quads(Quads const* x, Quads* to)
{
#if defined(__AVX512BW__)
    Quads const a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    Quads const c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    to[0] = _mm512_shuffle_f32x4(a, b, 0x88), to[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    to[2] = _mm512_shuffle_f32x4(c, d, 0x88), to[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
#else
    to[0] = _mm256_permute2f128_ps(x[0], x[1], 0x20), to[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
#endif
}

// A unit's codes of all rows by fours, in the order of a token's; for 8 bits with AVX2 first their lower halves, then the upper
// ones.
#if defined(__AVX512BW__)

template <int Bits>
constexpr int kFours = 8;

template <int Bits>
inline void unpack(uint8_t const* const* rows, int64_t unit, Bytes* to)
{
    for (int i = 0; i < Bits; i += 4)
        turn_rows(rows, unit * kUnit * Bits / 8 + 4 * i, to + i);
    if constexpr (Bits == 4)
    {
        Bytes const low = _mm512_set1_epi8(15);
        for (int i = 0; i < 4; ++i)
            to[4 + i] = _mm512_and_si512(_mm512_srli_epi16(to[i], 4), low), to[i] = _mm512_and_si512(to[i], low);
    }
}

#else

template <int Bits>
constexpr int kFours = 2 * Bits;

template <int Bits>
inline void unpack(uint8_t const* const* rows, int64_t unit, Bytes* to)
{
    Bytes const low = _mm256_set1_epi8(15);
    Bytes all[Bits];
    for (int i = 0; i < Bits; i += 4)
        turn_rows(rows, unit * kUnit * Bits / 8 + 4 * i, all + i);
    for (int i = 0; i < Bits; ++i)
        to[i] = _mm256_and_si256(all[i], low), to[Bits + i] = _mm256_and_si256(_mm256_srli_epi16(all[i], 4), low);
}

#endif

// Sums of products of a unit's codes and a token's; `x` is the token's first half.
template <int Bits>
inline Quads unit_products(Bytes const* codes, int8_t const* x)
{
#if defined(__AVX512BW__)
    Bytes halves[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half)
            asm("vpdpbusd %2%{1to16%}, %1, %0"
                : "+v"(halves[half])
                : "v"(codes[4 * half + i]), "m"(*reinterpret_cast<int8_t const(*)[4]>(x + half * kStep * kHalf + 4 * i)));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(halves[0], halves[1]));
#else
    auto const four = [=](int i) { return _mm256_set1_epi32(read<int32_t>(x + i / 4 * kStep * kHalf + i % 4 * 4)); };
    Bytes less = _mm256_setzero_si256(), more = less; // for codes below 16, sums of 32 products fit 16 bits
    for (int i = 0; i < 8; ++i)
    {
        less = _mm256_add_epi16(less, _mm256_maddubs_epi16(codes[i], four(i)));
        if constexpr (Bits == 8)
            more = _mm256_add_epi16(more, _mm256_maddubs_epi16(codes[8 + i], four(i)));
    }
    Bytes const sums = _mm256_madd_epi16(less, _mm256_set1_epi16(1));
    return _mm256_cvtepi32_ps(Bits == 4 ? sums : _mm256_add_epi32(sums, _mm256_madd_epi16(more, _mm256_set1_epi16(16))));
#endif
}

template <int Bits, typename S>
void multiply_lanes(Task const& task, int shift, int64_t row, int64_t t, int count)
{
    Layer const& layer = *task.layer;
    int64_t const units = layer.inputs / kUnit;
    Rows<S> rows[kStep];
    uint8_t const* codes_of[kLaneRows];
    for (int i = 0; i < kStep; ++i)
        rows[i] = rows_of<S>(task, row + i * kRows);
    for (int r = 0; r < kLaneRows; ++r)
        codes_of[r] = rows[r / kRows].codes[r % kRows];
    Quads totals[kMostLanes][kStep];
    for (int i = 0; i < count; ++i)
        for (Quads& total : totals[i])
            total = Quads{};
    auto const add_steps = [&](Rounded const& tokens, bool outliers)
    {
        for (int64_t unit = 0; unit < units; unit += kStep)
        {
            int const here = units - unit < kStep ? static_cast<int>(units - unit) : kStep;
            if (outliers && !marks_of_step(task, unit))
                continue;
            constexpr int bytes = kLaneRows * kStep * kUnit * Bits / 8;
            if (!outliers)
                for (int byte = 0; byte < bytes; byte += 64)
                    __builtin_prefetch(codes_of[0] + kAhead + unit / kStep * bytes + byte, 0, 1);
            Quads scales[kStep], leasts[kStep], scale[kStep], least[kStep];
            for (int i = 0; i < kStep; ++i)
            {
                Blocks const blocks = blocks_of<Bits>(task, rows[i], shift, unit, here);
                scales[i] = blocks.scale, leasts[i] = blocks.least;
            }
            turn_quads(scales, scale), turn_quads(leasts, least);
            for (int part = 0; part < here; ++part)
            {
                Marks marks = marks_of(task)[unit + part];
                if (outliers && !marks)
                    continue;
                Bytes codes[kFours<Bits>];
                unpack<Bits>(codes_of, unit + part, codes);
                auto const add = [&](int i)
                {
                    int64_t const place = (t + i) * tokens.units + unit;
                    Quads const sums = unit_products<Bits>(codes, tokens.codes + place * kUnit + part * kHalf);
                    totals[i][part] += sums * scale[part] * spread(tokens.factors[(place + part) * kRows]);
                    totals[i][part] += least[part] * spread(tokens.sums[(place + part) * kRows]);
                };
                if (outliers)
                    for (; marks; marks &= marks - 1)
                        add(__builtin_ctzll(marks));
                else
                    for (int i = 0; i < count; ++i)
                        add(i);
            }
        }
    };
    add_steps(*task.rounded, false);
    add_steps(*task.rounded->rest, true);
    int64_t const left = task.row + task.rows - row, wide = left < kLaneRows ? left : kLaneRows;
    for (int i = 0; i < count; ++i)
    {
        float* const to = at<float>(task.tensors->output, (task.token + t + i) * layer.outputs + row);
        Quads found = totals[i][0] + totals[i][1];
        if constexpr (kStep == 4)
            found = (totals[i][0] + totals[i][2]) + (totals[i][1] + totals[i][3]);
        if (wide == kLaneRows)
            std::memcpy(to, &found, sizeof found);
        else
            std::memcpy(to, &found, static_cast<size_t>(wide) * sizeof(float));
    }
}

} // namespace
