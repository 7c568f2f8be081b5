// The tasks of experts, except those over blocks. Compiled once per instruction set; STILL_KERNELS names the table.
#include "experts.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/common/elements.h"
#include "cpu/common/simd.h"

namespace
{

using namespace still_cpu::experts;

constexpr int kRows = 4;                      // outputs at once
constexpr int kTokens = kLanes == 16 ? 4 : 2; // most for which registers hold the sums
constexpr int64_t kAhead = 2;                 // groups of rows that are prefetched

inline Vec load_numbers(float const* x)
{
    return load(x);
}

inline Vec load_numbers(Half const* x)
{
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(x))));
#elif defined(__F16C__)
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i const*>(x))));
#else
    Vec v;
    for (int i = 0; i < kLanes; ++i)
        v[i] = to_float(x[i]);
    return v;
#endif
}

template <typename T>
inline Vec load_numbers_part(T const* x, int n)
{
    float numbers[kLanes] = {};
    for (int i = 0; i < n; ++i)
        numbers[i] = to_float(x[i]);
    return load(numbers);
}

// kRows outputs of `Count` tokens, or their subtrahends; the last row is repeated after the end.
template <typename T, int Count, bool Subtract>
inline void tile(Task const& task, T const* const* rows, int count, int64_t row, int64_t token)
{
    float const* const x = task.input + token * task.inputs;
    Vec total[kRows][Count];
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < Count; ++t)
            total[r][t] = Vec{};
    int64_t i = 0;
    for (; i + kLanes <= task.inputs; i += kLanes)
    {
        Vec given[Count];
        for (int t = 0; t < Count; ++t)
            given[t] = load(x + t * task.inputs + i);
        for (int r = 0; r < kRows; ++r)
        {
            Vec const weight = load_numbers(rows[r] + i);
            for (int t = 0; t < Count; ++t)
                total[r][t] += weight * given[t];
        }
    }
    if (int const left = static_cast<int>(task.inputs - i))
        for (int r = 0; r < kRows; ++r)
        {
            Vec const weight = load_numbers_part(rows[r] + i, left);
            for (int t = 0; t < Count; ++t)
                total[r][t] += weight * load_part(x + t * task.inputs + i, left, 0);
        }
    for (int t = 0; t < Count; ++t)
        for (int r = 0; r < count; ++r)
        {
            float& output = task.output[(token + t) * task.outputs + row + r];
            output = Subtract ? output - sum(total[r][t]) : sum(total[r][t]);
        }
}

template <typename T, bool Subtract>
inline void tiles(Task const& task, T const* const* rows, int count, int64_t row)
{
    int64_t t = 0;
    for (; t + kTokens <= task.tokens; t += kTokens)
        tile<T, kTokens, Subtract>(task, rows, count, row, t);
    for (; t < task.tokens; ++t)
        tile<T, 1, Subtract>(task, rows, count, row, t);
}

template <typename T>
void multiply(Task const& task)
{
    int64_t const end = task.row + task.rows, row_bytes = task.inputs * static_cast<int64_t>(sizeof(T));
    for (int64_t row = task.row; row < end; row += kRows)
    {
        int const count = static_cast<int>(end - row < kRows ? end - row : kRows);
        T const* rows[kRows];
        for (int r = 0; r < kRows; ++r)
            rows[r] = at<T>(task.weight, (row + (r < count ? r : count - 1)) * task.inputs);
        // Prefetch: hardware prefetchers follow one stream, not four.
        auto const* const next = reinterpret_cast<char const*>(rows[0]) + kAhead * kRows * row_bytes;
        for (int64_t byte = 0; byte < kRows * row_bytes; byte += 64)
            __builtin_prefetch(next + byte, 0, 1);
        tiles<T, false>(task, rows, count, row);
    }
}

template <typename T>
void widen(void const* from, int64_t count, float* to)
{
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        store(to + i, load_numbers(at<T>(from, i)));
    for (; i < count; ++i)
        to[i] = to_float(at<T>(from, i)[0]);
}

// kLanes consecutive codes of `Bits`.
template <int Bits>
inline Vec codes_of(uint8_t const* x)
{
    typedef uint8_t Narrow __attribute__((vector_size(kLanes)));
    if constexpr (Bits == 8)
    {
        Narrow narrow;
        std::memcpy(&narrow, x, sizeof narrow);
        return __builtin_convertvector(narrow, Vec);
    }
    uint64_t word = 0;
    std::memcpy(&word, x, kLanes / 2);
    VecInt codes = static_cast<int32_t>(word) - VecInt{}, shifts{};
    for (int i = 0; i < kLanes; ++i)
        shifts[i] = i % 8 * 4;
    if constexpr (kLanes > 8)
        for (int i = 8; i < kLanes; ++i)
            codes[i] = static_cast<int32_t>(word >> 32);
    return __builtin_convertvector(codes >> shifts & 15, Vec);
}

// Zero points of a row times its scales.
template <int Bits>
inline void scaled_zeros(uint8_t const* row, float const* scales, int64_t blocks, float* to)
{
    int64_t b = 0;
    for (; b + kLanes <= blocks; b += kLanes)
        store(to + b, codes_of<Bits>(row + b * Bits / 8) * load(scales + b));
    if (int const left = static_cast<int>(blocks - b))
    {
        uint8_t codes[kLanes] = {};
        std::memcpy(codes, row + b * Bits / 8, static_cast<size_t>((left * Bits + 7) / 8));
        Vec const values = codes_of<Bits>(codes) * load_part(scales + b, left, 0);
        std::memcpy(to + b, &values, sizeof(float) * static_cast<unsigned>(left));
    }
}

template <int Bits>
void subtract_zeros(Task task, Zeros const& zeros)
{
    int64_t const blocks = zeros.matrix->blocks();
    task.inputs = blocks, task.input = zeros.sums;
    for (int64_t first = 0; first < task.rows; first += kRows)
    {
        int const count = static_cast<int>(task.rows - first < kRows ? task.rows - first : kRows);
        float const* rows[kRows];
        for (int r = 0; r < kRows; ++r)
        {
            int64_t const row = first + (r < count ? r : count - 1);
            float* const own = zeros.room + r * blocks;
            scaled_zeros<Bits>(zeros.zero_points + row * zeros.matrix->zero_bytes, zeros.scales + row * blocks, blocks, own);
            rows[r] = own;
        }
        tiles<float, true>(task, rows, count, task.row + first);
    }
}

void subtract_zeros(Task const& task, Zeros const& zeros)
{
    (zeros.matrix->bits == 4 ? subtract_zeros<4> : subtract_zeros<8>)(task, zeros);
}

void activate(float const* from, int64_t inner, bool gated, float* to)
{
    for (int64_t i = 0; i < inner; i += kLanes)
    {
        int const count = static_cast<int>(inner - i < kLanes ? inner - i : kLanes);
        Vec result = {};
        if (gated)
        {
            Vec gate = {}, up = {};
            for (int j = 0; j < count; ++j)
                gate[j] = from[2 * (i + j)], up[j] = from[2 * (i + j) + 1];
            result = gate / (exponential(-gate) + 1.0f) * up;
        }
        else
        {
            Vec const up = load_part(from + i, count, 0);
            result = up < 0.0f ? Vec{} : up * up; // keeps NaN
        }
        std::memcpy(to + i, &result, sizeof(float) * static_cast<unsigned>(count));
    }
}

template <typename T>
void combine(
    float const* parts, int64_t const* places, float const* weights, int64_t chosen, int64_t channels, float* sum, void* output)
{
    for (int64_t i = 0; i < channels; ++i)
        sum[i] = 0;
    for (int64_t j = 0; j < chosen; ++j)
    {
        float const* const part = parts + places[j] * channels;
        for (int64_t i = 0; i < channels; ++i)
            sum[i] += weights[j] * part[i];
    }
    for (int64_t i = 0; i < channels; ++i)
        from_float(sum[i], at<T>(output, i));
}

template <typename T>
constexpr Kernels kTable{widen<T>, multiply<T>, activate, subtract_zeros, combine<T>};

} // namespace

still_cpu::experts::Kernels const& still_cpu::experts::STILL_KERNELS(Numbers kind)
{
    return kind == Numbers::kHalf ? kTable<Half> : kTable<float>;
}
