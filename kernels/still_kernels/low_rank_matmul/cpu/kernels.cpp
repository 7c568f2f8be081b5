// The task of a product with two thin matrices. Compiled once per instruction set; STILL_KERNELS names the table.
#include "low_rank_matmul.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <type_traits>

#include "cpu/common/elements.h"
#include "cpu/common/gemm.h"

namespace
{

using namespace still_cpu::low_rank;

// The matrix itself, or a float copy.
template <typename T>
float const* as_floats(void const* from, int64_t n, Room& room)
{
    if constexpr (std::is_same_v<T, float>)
        return static_cast<float const*>(from);
    float* const to = room.take(n);
    for (int64_t i = 0; i < n; ++i)
        to[i] = to_float(at<T>(from, i)[0]);
    return to;
}

// Number of last rows of the first matrix for which whole vectors would read beyond its end.
inline int last_rows(Layer const& l)
{
    int const over = round_up(l.rank, kLanes) - l.rank, rows = (over + l.rank - 1) / l.rank;
    return rows < l.inputs ? rows : l.inputs;
}

template <typename T>
size_t room(Layer const& l)
{
    int64_t const wide = round_up(l.rank, kLanes), copies = kTokens * (static_cast<int64_t>(l.inputs) + l.outputs);
    int64_t const matrices = static_cast<int64_t>(l.rank) * (l.inputs + l.outputs);
    return static_cast<size_t>((kTokens + last_rows(l)) * wide + (std::is_same_v<T, float> ? 0 : copies + matrices) + 6 * 16);
}

template <typename T>
void multiply(Task const& task)
{
    Layer const& l = *task.layer;
    Tensors const& x = *task.tensors;
    Room room{task.room};
    int const wide = round_up(l.rank, kLanes), last = last_rows(l), first = l.inputs - last;
    float* const low = room.take(static_cast<int64_t>(kTokens) * wide);
    float* const padded = room.take(static_cast<int64_t>(last) * wide);
    float const* const given = as_floats<T>(at<T>(x.input, task.token * l.inputs), static_cast<int64_t>(task.count) * l.inputs, room);
    float const* const inner = as_floats<T>(x.inner, static_cast<int64_t>(l.inputs) * l.rank, room);
    float const* const outer = as_floats<T>(x.outer, static_cast<int64_t>(l.rank) * l.outputs, room);
    // Whole vectors of a row reach into the next ones; these results are not used.
    gemm(task.count, wide, first, given, l.inputs, 1, inner, l.rank, low, wide, false);
    for (int r = 0; r < last; ++r)
        for (int i = 0; i < wide; ++i)
            padded[r * wide + i] = i < l.rank ? inner[static_cast<int64_t>(first + r) * l.rank + i] : 0;
    gemm(task.count, wide, last, given + first, l.inputs, 1, padded, wide, low, wide, true);
    T* const output = at<T>(x.output, task.token * l.outputs);
    int64_t const numbers = static_cast<int64_t>(task.count) * l.outputs;
    T const* const base = x.base ? at<T>(x.base, task.token * l.outputs) : nullptr;
    if constexpr (std::is_same_v<T, float>)
    {
        if (base)
            std::memcpy(output, base, static_cast<size_t>(numbers) * sizeof(float));
        gemm(task.count, l.outputs, l.rank, low, wide, 1, outer, l.outputs, output, l.outputs, base != nullptr);
    }
    else
    {
        for (int i = 0; i < task.count * wide; ++i)
        {
            T rounded;
            from_float(low[i], &rounded);
            low[i] = to_float(rounded);
        }
        float* const sums = room.take(numbers);
        gemm(task.count, l.outputs, l.rank, low, wide, 1, outer, l.outputs, sums, l.outputs, false);
        for (int64_t i = 0; i < numbers; ++i)
            from_float(base ? sums[i] + to_float(base[i]) : sums[i], output + i);
    }
}

template <typename T>
constexpr Kernels kTable{room<T>, multiply<T>};

} // namespace

still_cpu::low_rank::Kernels const& still_cpu::low_rank::STILL_KERNELS(Numbers kind)
{
    return kind == Numbers::kHalf ? kTable<Half> : kTable<float>;
}
