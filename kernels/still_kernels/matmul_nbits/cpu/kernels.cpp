// The tasks of a GEMM with a weight in blocks. Compiled once per instruction set; STILL_KERNELS names the table.
#include "matmul_nbits.h"

#include <cmath>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/common/elements.h"
#include "cpu/common/simd.h"
#include "steps.h"

namespace
{

using namespace still_cpu::low_bit;

constexpr int kHalf = kUnit / 2;
constexpr int kAhead = 6144; // least bytes of the weight to prefetch

// Step size of a unit's codes, whose largest magnitude is 127.
inline float step_of(float const* x)
{
    VecInt most = {};
    for (int i = 0; i < kUnit; i += kLanes)
    {
        VecInt const magnitude = reinterpret_cast<VecInt>(load(x + i)) & 0x7fffffff; // NaN is larger than any number
        most = most > magnitude ? most : magnitude;
    }
    int32_t bits_of_most = 0;
    for (int i = 0; i < kLanes; ++i)
        bits_of_most = most[i] > bits_of_most ? most[i] : bits_of_most;
    float largest_number;
    std::memcpy(&largest_number, &bits_of_most, sizeof largest_number);
    return largest_number / 127;
}

// Factor from numbers to codes; 0 for tiny steps and NaN.
inline float inverse_of(float step)
{
    return step >= 1.17549435e-38f ? 1 / step : 0;
}

// The nearest integers.
inline VecInt nearest(Vec x)
{
    constexpr float shift = 12582912.0f; // 1.5 * 2^23: the sum's low bits are the nearest integer
    return reinterpret_cast<VecInt>(x + shift) - 0x4b400000;
}

// Number of groups of consecutive outputs, `bytes` each, to prefetch. Hardware prefetchers follow sequential reads, not several rows.
// Prefetches go step by step, because many lines at once stall.
inline int64_t groups_ahead(int64_t bytes)
{
    return (kAhead + bytes - 1) / bytes;
}

// The place of a unit's first codes: steps hold the first halves of their units, then the second ones.
inline int8_t* place(int8_t* codes, int64_t unit)
{
    return codes + unit / kStep * kStep * kUnit + unit % kStep * kHalf;
}

// The step size beyond which a unit of a token has an outlier; infinite or NaN, so that none is, if an input is or nearly.
inline float outlier_step(float const* x, int64_t inputs)
{
    Vec squares = {};
    for (int64_t i = 0; i < inputs; i += kLanes)
        squares += load(x + i) * load(x + i);
    float sum = 0;
    for (int i = 0; i < kLanes; ++i)
        sum += squares[i];
    return kOutlier / 127 * std::sqrt(sum / static_cast<float>(inputs));
}

// Rounds one unit of a token. Its first half is the inputs at even places for 4-bit codes, two in a byte, and the first 16 for 8 bits.
// `rest` is what rounding leaves.
inline void round_unit(float const* x, int bits, int8_t* first, float* factor, float* sum, float* rest)
{
    float const step = step_of(x);
    float const inverse = inverse_of(step);
    int32_t codes[kUnit];
    VecInt total = {};
    for (int i = 0; i < kUnit; i += kLanes)
    {
        VecInt const code = nearest(load(x + i) * inverse);
        total += code;
        std::memcpy(codes + i, &code, sizeof code);
        Vec const left = load(x + i) - step * __builtin_convertvector(code, Vec);
        std::memcpy(rest + i, &left, sizeof left);
    }
    int8_t* const second = first + kStep * kHalf;
    for (int i = 0; i < kHalf; ++i)
    {
        first[i] = static_cast<int8_t>(codes[bits == 4 ? 2 * i : i]);
        second[i] = static_cast<int8_t>(codes[bits == 4 ? 2 * i + 1 : kHalf + i]);
    }
    int32_t whole = 0;
    for (int i = 0; i < kLanes; ++i)
        whole += total[i];
    for (int r = 0; r < kRows; ++r)
        factor[r] = step, sum[r] = step * static_cast<float>(whole);
}

void round_units(Task const& task)
{
    Layer const& layer = *task.layer;
    Rounded const &to = *task.rounded, &rest = *to.rest;
    int64_t const units = to.units;
    for (int64_t t = 0; t < task.tokens; ++t)
    {
        float const* const x = at<float>(task.tensors->input, (task.token + t) * layer.inputs);
        float const limit = outlier_step(x, layer.inputs);
        for (int64_t u = 0; u < units; ++u)
        {
            int64_t const own = t * units + u;
            auto const codes = [=](Rounded const& of) { return place(of.codes + t * units * kUnit, u); };
            auto const clear = [=](Rounded const& of)
            {
                std::memset(codes(of), 0, kHalf);
                std::memset(codes(of) + kStep * kHalf, 0, kHalf);
                std::memset(of.factors + own * kRows, 0, sizeof(float) * kRows);
                std::memset(of.sums + own * kRows, 0, sizeof(float) * kRows);
            };
            bool const padding = u >= layer.inputs / kUnit;
            float left[kUnit], last[kUnit];
            if (padding)
                clear(to);
            else
                round_unit(x + u * kUnit, layer.bits, codes(to), to.factors + own * kRows, to.sums + own * kRows, left);
            if (!padding && to.factors[own * kRows] > limit)
                round_unit(left, layer.bits, codes(rest), rest.factors + own * kRows, rest.sums + own * kRows, last);
            else
                clear(rest);
        }
    }
}

} // namespace

#include "tiles.h"

namespace
{

void round(Task const& task)
{
    (task.layer->super_block ? round_tokens : round_units)(task);
}

// Location of the blocks' numbers of four rows.
template <typename S>
struct Rows
{
    uint8_t const* codes[kRows];
    S const* scales[kRows];
    S const* offsets[kRows];
    uint8_t const* zero_points[kRows];
};

// Numbers of `count` units from `unit`; a block has 2^shift units.
template <typename S>
inline Quads numbers(S const* const* rows, int64_t unit, int count, int shift)
{
    if (shift == 0)
        return load_numbers(rows, unit, count);
    S copies[kRows][kStep] = {};
    S const* places[kRows];
    for (int r = 0; r < kRows; ++r)
    {
        for (int i = 0; i < count; ++i)
            copies[r][i] = rows[r][(unit + i) >> shift];
        places[r] = copies[r];
    }
    return load_numbers(places, 0, kStep);
}

// The same for zero points.
template <int Bits>
inline Quads zeros(uint8_t const* const* rows, int64_t unit, int count, int shift)
{
    uint32_t words[kRows] = {};
    for (int r = 0; r < kRows; ++r)
        if (shift == 0 && kStep * Bits % 8 == 0 && count == kStep)
            std::memcpy(words + r, rows[r] + unit * Bits / 8, static_cast<size_t>(kStep * Bits / 8));
        else
            for (int i = 0; i < count; ++i)
            {
                int64_t const bit = ((unit + i) >> shift) * Bits;
                words[r] |= (static_cast<uint32_t>(rows[r][bit / 8]) >> bit % 8 & ((1u << Bits) - 1)) << Bits * i;
            }
    return from_codes<Bits>(words);
}

// Scales of the codes in `units` units of four rows, and the values of code 0.
struct Blocks
{
    Quads scale, least;
};

template <int Bits, typename S>
inline Blocks blocks_of(Task const& task, Rows<S> const& rows, int shift, int64_t unit, int units)
{
    Quads const scale = numbers(rows.scales, unit, units, shift);
    Quads const zero = task.tensors->zero_points ? zeros<Bits>(rows.zero_points, unit, units, shift)
                                                 : spread(static_cast<float>(task.layer->zero));
    return {scale, (task.tensors->offsets ? numbers(rows.offsets, unit, units, shift) : Quads{}) - zero * scale};
}

// The same for blocks of one unit without zero points and offsets.
template <typename S>
inline Blocks plain_blocks(Task const& task, Rows<S> const& rows, int64_t unit, int units)
{
    Quads const scale = load_numbers(rows.scales, unit, units);
    return {scale, Quads{} - spread(static_cast<float>(task.layer->zero)) * scale};
}

// Adds a token's dequantized sums over the units at `place`.
inline void add_unit(Rounded const& tokens, Blocks const& blocks, int64_t place, Quads sums, Quads& total)
{
    total += sums * blocks.scale * load(tokens.factors + place * kRows);
    total += blocks.least * load(tokens.sums + place * kRows);
}

// A step of `units` units over kRows outputs of `Count` tokens, the first at place `t` of `task.rounded`.
template <int Bits, int Count, bool Plain, typename S>
inline void step(Task const& task, Rows<S> const& rows, int shift, int64_t unit, int units, int64_t t, Quads* total)
{
    Rounded const& tokens = *task.rounded;
    Bytes first[kRows], second[kRows];
    for (int r = 0; r < kRows; ++r)
        load_codes<Bits>(rows.codes[r] + unit * kUnit * Bits / 8, units, first[r], second[r]);
    Blocks const blocks = Plain ? plain_blocks(task, rows, unit, units) : blocks_of<Bits>(task, rows, shift, unit, units);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (Count > 1)
    {
        pair_rows(first), pair_rows(second);
        for (int i = 0; i < Count; i += 2)
        {
            int64_t const place = (t + i) * tokens.units + unit;
            Quads sums[2];
            pair_products(first, second, tokens.codes + place * kUnit, tokens.units * kUnit, sums);
            add_unit(tokens, blocks, place, sums[0], total[i]);
            add_unit(tokens, blocks, place + tokens.units, sums[1], total[i + 1]);
        }
        return;
    }
#endif
    for (int i = 0; i < Count; ++i)
    {
        int64_t const place = (t + i) * tokens.units + unit;
        Bytes const x = load_bytes(tokens.codes + place * kUnit), y = load_bytes(tokens.codes + place * kUnit + kStep * kHalf);
        Sums sums[kRows];
        for (int r = 0; r < kRows; ++r)
            sums[r] = products<Bits>(first[r], second[r], x, y);
        add_unit(tokens, blocks, place, to_quads(sums), total[i]);
    }
}

// For each unit of whole steps the tokens of a pass with an outlier there, which `mark_outliers` writes.
inline Marks* marks_of(Task const& task)
{
    return reinterpret_cast<Marks*>(task.room);
}

// Marks `count` tokens from `t`. Read once for all rows: factors of many tokens fill the L1 cache.
inline void mark_outliers(Task const& task, int64_t t, int64_t count)
{
    Rounded const& rest = *task.rounded->rest;
    int64_t const units = task.layer->inputs / kUnit;
    Marks* const marks = marks_of(task);
    for (int64_t u = 0; u < up(units, kStep); ++u)
        marks[u] = 0;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t u = 0; u < units; ++u)
            marks[u] |= static_cast<Marks>(rest.factors[((t + i) * rest.units + u) * kRows] != 0) << i;
}

// The tokens with an outlier in the step from `unit`.
inline Marks marks_of_step(Task const& task, int64_t unit)
{
    Marks all = 0;
    for (int i = 0; i < kStep; ++i)
        all |= marks_of(task)[unit + i];
    return all;
}

// Four rows; the last one is repeated after the end.
template <typename S>
inline Rows<S> rows_of(Task const& task, int64_t row)
{
    Layer const& layer = *task.layer;
    Tensors const& x = *task.tensors;
    Rows<S> rows;
    for (int r = 0; r < kRows; ++r)
    {
        int64_t const own = row + r < layer.outputs ? row + r : layer.outputs - 1;
        rows.codes[r] = x.blocks + own * layer.row_bytes();
        rows.scales[r] = at<S>(x.scales, own * layer.blocks());
        rows.offsets[r] = x.offsets ? at<S>(x.offsets, own * layer.blocks()) : nullptr;
        rows.zero_points[r] = x.zero_points ? x.zero_points + own * layer.zero_bytes : nullptr;
    }
    return rows;
}

template <int Bits, int Count, typename S, bool Plain = false>
inline void tile(Task const& task, int shift, int64_t row, int64_t t)
{
    Layer const& layer = *task.layer;
    Rows<S> const rows = rows_of<S>(task, row);
    Quads total[Count];
    for (int i = 0; i < Count; ++i)
        total[i] = Quads{};
    int64_t const units = layer.inputs / kUnit;
    int64_t const codes_bytes = kRows * layer.row_bytes(), scales_bytes = kRows * layer.blocks() * static_cast<int64_t>(sizeof(S));
    int64_t const groups = groups_ahead(codes_bytes);
    for (int64_t byte = 0; byte < scales_bytes; byte += 64)
        __builtin_prefetch(reinterpret_cast<uint8_t const*>(rows.scales[0]) + groups * scales_bytes + byte);
    uint8_t const* codes = rows.codes[0] + groups * codes_bytes;
    int64_t u = 0;
    for (; u + kStep <= units; u += kStep)
    {
        constexpr int bytes = kRows * kStep * kUnit * Bits / 8;
        for (int byte = 0; byte < bytes; byte += 64)
            __builtin_prefetch(codes + byte);
        codes += bytes;
        step<Bits, Count, Plain>(task, rows, shift, u, kStep, t, total);
    }
    if (u < units)
        step<Bits, Count, Plain>(task, rows, shift, u, static_cast<int>(units - u), t, total);
    Task rest = task;
    rest.rounded = task.rounded->rest;
    for (u = 0; u < units; u += kStep)
        for (Marks marks = marks_of_step(task, u); marks; marks &= marks - 1)
        {
            int const i = __builtin_ctzll(marks);
            step<Bits, 1, Plain>(rest, rows, shift, u, static_cast<int>(units - u < kStep ? units - u : kStep), t + i, total + i);
        }
    int64_t const count = layer.outputs - row < kRows ? layer.outputs - row : kRows;
    for (int i = 0; i < Count; ++i)
    {
        float* const to = at<float>(task.tensors->output, (task.token + t + i) * layer.outputs + row);
        float found[kRows];
        sum_quads(total[i], found);
        if (count == kRows) // a constant size needs no call
            std::memcpy(to, found, sizeof found);
        else
            std::memcpy(to, found, static_cast<size_t>(count) * sizeof(float));
    }
}

} // namespace

#if defined(__AVX2__)
#include "lanes.h"
#endif

namespace
{

// All rows for some of the tokens from `t`; returns their number.
template <int Bits, typename S>
int64_t multiply_some(Task const& task, int shift, int64_t t)
{
    int64_t const left = task.tokens - t, end = task.row + task.rows;
#if defined(__AVX2__)
    if (left >= kLeastLanes || (kLeastLanes == 2 && task.tokens > 1))
    {
        int64_t const count = left < kMostLanes ? left : kMostLanes;
        mark_outliers(task, t, count);
        for (int64_t row = task.row; row < end; row += kLaneRows)
            multiply_lanes<Bits, S>(task, shift, row, t, static_cast<int>(count));
        return count;
    }
#endif
    if (left > 1)
    {
        int64_t const count = left >= kMostTokens ? kMostTokens : left >= 4 ? 4 : 2;
        mark_outliers(task, t, count);
        for (int64_t row = task.row; row < end; row += kRows)
            switch (count)
            {
            case 2: tile<Bits, 2, S>(task, shift, row, t); break;
            case 4: tile<Bits, 4, S>(task, shift, row, t); break;
            default: tile<Bits, kMostTokens, S>(task, shift, row, t);
            }
        return count;
    }
    mark_outliers(task, t, 1);
    bool const plain = shift == 0 && !task.tensors->zero_points && !task.tensors->offsets;
    for (int64_t row = task.row; row < end; row += kRows)
        (plain ? tile<Bits, 1, S, true> : tile<Bits, 1, S>)(task, shift, row, t);
    return 1;
}

template <int Bits, typename S>
void multiply_bits(Task const& task)
{
    int shift = 0;
    while (kUnit << shift < task.layer->block)
        ++shift;
    for (int64_t t = 0; t < task.tokens;)
        t += multiply_some<Bits, S>(task, shift, t);
}

template <typename S>
void multiply(Task const& task)
{
    if (task.layer->bits == 4)
        multiply_bits<4, S>(task);
    else
        multiply_bits<8, S>(task);
}

void multiply(Task const& task)
{
    if (task.layer->super_block)
        multiply_tiles(task);
    else if (task.layer->half_scales)
        multiply<Half>(task);
    else
        multiply<float>(task);
}

// The same over the weight as float numbers, in blocks of any size.
template <typename T, typename S>
void exact(Task const& task)
{
    Layer const& layer = *task.layer;
    Tensors const& x = *task.tensors;
    int const n = static_cast<int>(layer.inputs), most = (1 << layer.bits) - 1;
    float *const weight = task.room, *const token = weight + round_up(n, 16);
    for (int64_t row = task.row; row < task.row + task.rows; ++row)
    {
        uint8_t const* const codes = x.blocks + row * layer.row_bytes();
        for (int64_t b = 0; b < layer.blocks(); ++b)
        {
            int64_t const place = row * layer.blocks() + b, bit = b * layer.bits;
            float const scale = to_float(at<S>(x.scales, place)[0]), offset = x.offsets ? to_float(at<S>(x.offsets, place)[0]) : 0;
            int const zero = x.zero_points ? x.zero_points[row * layer.zero_bytes + bit / 8] >> bit % 8 & most : layer.zero;
            for (int64_t i = b * layer.block; i < (b + 1) * layer.block; ++i)
            {
                int const code = layer.bits == 8 ? codes[i] : codes[i / 2] >> i % 2 * 4 & 15;
                weight[i] = static_cast<float>(code - zero) * scale + offset;
            }
        }
        for (int64_t t = task.token; t < task.token + task.tokens; ++t)
        {
            T const* const given = at<T>(x.input, t * layer.inputs);
            for (int i = 0; i < n; ++i)
                token[i] = to_float(given[i]);
            from_float(dot(weight, token, n), at<T>(x.output, t * layer.outputs + row));
        }
    }
}

template <typename T>
void exact(Task const& task)
{
    if (task.layer->half_scales)
        exact<T, Half>(task);
    else
        exact<T, float>(task);
}

template <typename T>
constexpr Kernels kTable{kStep, round, multiply, exact<T>};

} // namespace

still_cpu::low_bit::Kernels const& still_cpu::low_bit::STILL_KERNELS(Numbers kind)
{
    return kind == Numbers::kHalf ? kTable<Half> : kTable<float>;
}
