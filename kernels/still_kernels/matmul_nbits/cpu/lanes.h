// Eight outputs at a time, a lane each, of up to kMostTokens tokens. Compiled for AVX2 alone, over steps.h.
//
// A step's codes are turned and unpacked once for all tokens, and a token's products need no sums across lanes: 20 instructions for 256
// products of 4 bits, in rows 29. Sums of a unit are exact, and units at even and odd places are summed apart as the halves of Quads are:
// bit for bit what `tile` gives.
#pragma once

namespace
{

// Dwords of 16 bytes of eight rows: of each place one of every row.
inline void turn_rows(uint8_t const* const* rows, int64_t byte, Bytes* to)
{
    auto const some = [=](int r) { return _mm_loadu_si128(reinterpret_cast<__m128i const*>(rows[r] + byte)); };
    auto const both = [=](int r) { return _mm256_set_m128i(some(r + kRows), some(r)); };
    Bytes const a = both(0), b = both(1), c = both(2), d = both(3);
    Bytes const ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    Bytes const ab_high = _mm256_unpackhi_epi32(a, b), cd_high = _mm256_unpackhi_epi32(c, d);
    to[0] = _mm256_unpacklo_epi64(ab, cd), to[1] = _mm256_unpackhi_epi64(ab, cd);
    to[2] = _mm256_unpacklo_epi64(ab_high, cd_high), to[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
}

// A unit's codes of eight rows by fours, in the order in which a token's lie; of 8 bits first their lower halves, then the upper ones.
template <int Bits>
inline void unpack(uint8_t const* const* rows, int64_t unit, Bytes* to)
{
    Bytes const low = _mm256_set1_epi8(15);
    constexpr int count = Bits; // of dwords in a row's unit
    Bytes all[count];
    for (int i = 0; i < count; i += 4)
        turn_rows(rows, unit * kUnit * Bits / 8 + 4 * i, all + i);
    for (int i = 0; i < count; ++i)
        to[i] = _mm256_and_si256(all[i], low), to[count + i] = _mm256_and_si256(_mm256_srli_epi16(all[i], 4), low);
}

// Sums of products of a unit's codes and a token's, of which `x` is the first half.
template <int Bits>
inline __m256i unit_products(Bytes const* codes, int8_t const* x)
{
    auto const four = [=](int i) { return _mm256_set1_epi32(read<int32_t>(x + i / 4 * kStep * kHalf + i % 4 * 4)); };
    Bytes less = _mm256_setzero_si256(), more = less; // of codes below 16, 32 products are less than 16 bits hold
    for (int i = 0; i < 8; ++i)
    {
        less = _mm256_add_epi16(less, _mm256_maddubs_epi16(codes[i], four(i)));
        if constexpr (Bits == 8)
            more = _mm256_add_epi16(more, _mm256_maddubs_epi16(codes[8 + i], four(i)));
    }
    Bytes const sums = _mm256_madd_epi16(less, _mm256_set1_epi16(1));
    return Bits == 4 ? sums : _mm256_add_epi32(sums, _mm256_madd_epi16(more, _mm256_set1_epi16(16)));
}

template <int Bits, typename S>
void multiply_lanes(Task const& task, int shift, int64_t row, int64_t t, int count)
{
    Layer const& layer = *task.layer;
    Rounded const& tokens = *task.rounded;
    int64_t const units = layer.inputs / kUnit;
    Rows<S> const rows[2] = {rows_of<S>(task, row), rows_of<S>(task, row + kRows)};
    uint8_t const* codes_of[2 * kRows];
    for (int r = 0; r < 2 * kRows; ++r)
        codes_of[r] = rows[r / kRows].codes[r % kRows];
    Quads totals[kMostTokens][kStep];
    for (int i = 0; i < count; ++i)
        totals[i][0] = totals[i][1] = Quads{};
    for (int64_t unit = 0; unit < units; unit += kStep)
    {
        constexpr int bytes = 2 * kRows * kStep * kUnit * Bits / 8;
        for (int byte = 0; byte < bytes; byte += 64)
            __builtin_prefetch(codes_of[0] + kAhead + unit / kStep * bytes + byte, 0, 1);
        int const here = units - unit < kStep ? 1 : kStep;
        Blocks const first = blocks_of<Bits>(task, rows[0], shift, unit, here), second = blocks_of<Bits>(task, rows[1], shift, unit, here);
        for (int part = 0; part < here; ++part)
        {
            auto const own = [=](Quads a, Quads b)
            { return part ? _mm256_permute2f128_ps(a, b, 0x31) : _mm256_permute2f128_ps(a, b, 0x20); };
            Quads const scale = own(first.scale, second.scale), least = own(first.least, second.least);
            Bytes codes[2 * Bits];
            unpack<Bits>(codes_of, unit + part, codes);
            for (int i = 0; i < count; ++i)
            {
                int64_t const place = (t + i) * tokens.units + unit;
                Quads const sums = _mm256_cvtepi32_ps(unit_products<Bits>(codes, tokens.codes + place * kUnit + part * kHalf));
                Quads const factor = spread_quads(tokens.factors[(place + part) * kRows]);
                Quads const total = plus_product(times(sums, scale), factor, totals[i][part]);
                totals[i][part] = plus_product(least, spread_quads(tokens.sums[(place + part) * kRows]), total);
            }
        }
    }
    int64_t const left = task.row + task.rows - row, wide = left < 2 * kRows ? left : 2 * kRows;
    for (int i = 0; i < count; ++i)
    {
        float* const to = at<float>(task.tensors->output, (task.token + t + i) * layer.outputs + row);
        Quads const found = totals[i][0] + totals[i][1];
        if (wide == 2 * kRows)
            _mm256_storeu_ps(to, found);
        else
            std::memcpy(to, &found, static_cast<size_t>(wide) * sizeof(float));
    }
}

} // namespace
