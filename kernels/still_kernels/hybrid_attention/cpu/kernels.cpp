// The tasks of hybrid attention. Compiled once per instruction set; STILL_KERNELS names the table.
#include "head.h"

#include "cpu/common/columns.h"

#include <type_traits>

namespace
{

using still_cpu::hybrid::kBlockRows;
using still_cpu::hybrid::Kernels;
using still_cpu::hybrid::kPartSlots;
using still_cpu::hybrid::kTileKeys;

size_t room(Layer const& l)
{
    int64_t const chunk = round_up(l.chunk, 16), projection = round_up(l.rows, 16);
    int64_t const keys = chunk > kTileKeys ? chunk : kTileKeys, rows = chunk > kBlockRows ? chunk : kBlockRows;
    int64_t const copied = l.dim * (2 * (keys > kPartSlots ? keys : kPartSlots) + l.rows + 3 * kBlockRows + 4);
    int64_t const logits = l.dim * keys + kBlockRows * (2 * chunk + keys + 3 * 16) + kPartSlots;
    int64_t const features = (kBlockRows + rows) * l.features + (rows + l.dim) * projection;
    return static_cast<size_t>(copied + logits + features + 4 * kBlockRows + 32 * 16);
}

template <typename T, typename S>
void promote(Task const& task)
{
    Head<T, S> const h(task);
    // The leaving chunk is where the new one will be.
    h.add_linear(h.x.window_key, h.x.window_value, h.ring(h.current), h.l.chunk, task.leaving_salient, Room{task.room});
    if (task.folded.count)
        h.add_linear(task.folded.keys, task.folded.values, 0, task.folded.count, nullptr, Room{task.room});
}

// Running softmax of a block of rows: maximum and sum of each row's terms, and their weighted values.
struct Softmax
{
    float* top;
    float* total;
    float* values; // [rows, D]
};

// Logits of a row to its window, [previous chunk, current chunk]: the score, then e^(logit - maximum) with 0 for masked keys.
template <typename T, typename S>
void attend_window_row(Head<T, S> const& h, float* logits, int end, int place, uint8_t const* chosen, float& top, float& total)
{
    Layer const& l = h.l;
    int const first = h.s.chunk > 0 ? 0 : l.chunk, own = l.chunk + place;
    int const oldest = h.s.chunk > 0 ? place + 1 : l.chunk; // of the C latest positions
    h.scores()[place] = saliency(l, logits + oldest, own - oldest, logits[own], place);
    if (l.sliding)
        for (int j = first; j <= own - l.window; ++j)
            if (!(j < l.chunk && chosen && chosen[j]))
                logits[j] = kMinusInfinity;
    top = largest(logits + first, own + 1 - first);
    bool const phantom = l.phantom && h.s.chunk == 0;
    if (phantom && top < 0)
        top = 0;
    total = exponentiate(logits + first, own + 1 - first, top);
    if (phantom)
        total += static_cast<float>(l.chunk) * exponential(-top);
    for (int j = own + 1; j < end; ++j)
        logits[j] = 0;
}

template <typename T, typename S>
void attend_window(
    Head<T, S> const& h, Task const& task, float const* q, int64_t q_stride, int first, int rows, Softmax& softmax, Room room)
{
    Layer const& l = h.l;
    int const start = h.s.offset + first, seen = start + rows, end = l.chunk + seen, wide = round_up(end, kLanes);
    bool const whole = l.chunk % kLanes == 0; // padding of the logits then follows the last of them
    float* const turned = room.take(static_cast<int64_t>(l.dim) * round_up(l.chunk, kLanes));
    float* const logits = room.take(static_cast<int64_t>(rows) * wide);
    float* const copy = room.take(static_cast<int64_t>(l.chunk) * l.dim);
    int64_t stride;
    for (int side = h.s.chunk > 0 ? 0 : 1; side < 2; ++side)
    {
        int const count = side ? seen : l.chunk;
        float const* const k = kept_floats<S>(h.x.window_key, h.ring(side ? h.current : h.previous), count, l.dim, copy, stride);
        int const padded = round_up(count, kLanes);
        transpose(k, count, l.dim, stride, h.factor, turned, padded);
        gemm(rows, whole ? padded : count, l.dim, q, q_stride, 1, turned, padded, logits + side * l.chunk, wide, false);
    }
    for (int i = 0; i < rows; ++i)
        attend_window_row(
            h, logits + static_cast<int64_t>(i) * wide, end, start + i, task.previous_salient, softmax.top[i], softmax.total[i]);
    for (int side = h.s.chunk > 0 ? 0 : 1; side < 2; ++side)
    {
        int const count = side ? seen : l.chunk;
        float const* const v = kept_floats<S>(h.x.window_value, h.ring(side ? h.current : h.previous), count, l.dim, copy, stride);
        gemm(rows, l.dim, count, logits + side * l.chunk, wide, 1, v, stride, softmax.values, l.dim, side == 1 && h.s.chunk > 0);
    }
}

// Adds cached tokens, tile by tile, with queries as columns; rescales them and the window's terms to a common maximum.
template <typename T, typename S>
void attend_cache(Head<T, S> const& h, float const* q, int64_t q_stride, int rows, Softmax& softmax, Room room)
{
    Layer const& l = h.l;
    if (h.s.held == 0)
        return;
    int const wide = round_up(rows, kLanes), stride = round_up(l.dim, kLanes);
    float* const queries = room.take(static_cast<int64_t>(l.dim) * wide);
    float* const logits = room.take(static_cast<int64_t>(kTileKeys) * wide);
    float* const copy = room.take(static_cast<int64_t>(kTileKeys) * l.dim);
    float* const values = room.take(static_cast<int64_t>(l.dim) * wide);
    float* const turned = room.take(static_cast<int64_t>(rows) * stride);
    float *const top = room.take(wide), *const total = room.take(wide);
    transpose(q, rows, l.dim, q_stride, h.factor, queries, wide);
    begin_columns(wide, l.dim, top, total, values);
    for (int64_t slot = 0; slot < h.s.held; slot += kTileKeys)
    {
        int const count = static_cast<int>(h.s.held - slot < kTileKeys ? h.s.held - slot : kTileKeys);
        int64_t row;
        float const* const k = kept_floats<S>(h.x.salient_key, h.cache(slot), count, l.dim, copy, row);
        gemm(count, wide, l.dim, k, row, 1, queries, wide, logits, wide, false);
        absorb(logits, count, wide, l.dim, top, total, values);
        float const* const v = kept_floats<S>(h.x.salient_value, h.cache(slot), count, l.dim, copy, row);
        gemm(l.dim, wide, count, v, 1, row, logits, wide, values, wide, true);
    }
    transpose(values, l.dim, rows, wide, 1, turned, stride);
    for (int i = 0; i < rows; ++i)
    {
        float const most = softmax.top[i] > top[i] ? softmax.top[i] : top[i];
        float const near = exponential(softmax.top[i] - most), far = exponential(top[i] - most);
        softmax.top[i] = most;
        softmax.total[i] = near * softmax.total[i] + far * total[i];
        for (int d = 0; d < l.dim; ++d)
        {
            float& value = softmax.values[static_cast<int64_t>(i) * l.dim + d];
            value = near * value + far * turned[static_cast<int64_t>(i) * stride + d];
        }
    }
}

// Adds a sliding window's tokens to the linear part: those still in the ring but not yet in the linear state.
template <typename T, typename S>
void add_window_linear(
    Head<T, S> const& h, Task const& task, float const* phi, int first, int rows, float* linear, float* linear_mass, Room room)
{
    Layer const& l = h.l;
    for (int side = h.s.chunk > 0 ? 0 : 1; side < 2; ++side)
    {
        Room rest = room;
        int const count = side ? h.s.offset + first + rows : l.chunk, slot = side ? h.current : h.previous;
        int64_t k_stride, v_stride;
        float const* const v =
            kept_floats<S>(h.x.window_value, h.ring(slot), count, l.dim, rest.take(static_cast<int64_t>(count) * l.dim), v_stride);
        float const* const k =
            kept_floats<S>(h.x.window_key, h.ring(slot), count, l.dim, rest.take(static_cast<int64_t>(count) * l.dim), k_stride);
        float const* const phi_k = h.features(k, count, k_stride, h.x.feature_k_weight, rest);
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < count && side * l.chunk + j <= l.chunk + h.s.offset + first + i - l.window; ++j)
            {
                if (side == 0 && task.previous_salient && task.previous_salient[j])
                    continue;
                float const similarity =
                    dot(phi + static_cast<int64_t>(i) * l.features, phi_k + static_cast<int64_t>(j) * l.features, l.features);
                linear_mass[i] += similarity;
                add_weighted(&similarity, v + j * v_stride, 1, l.dim, linear + static_cast<int64_t>(i) * l.dim);
            }
    }
}

template <typename T, typename S>
void attend(Task const& task, int first, int rows)
{
    Head<T, S> const h(task);
    Layer const& l = h.l;
    Room room{task.room};
    int64_t q_stride;
    float* const copy = room.take(static_cast<int64_t>(kBlockRows) * l.dim);
    float const* const q = floats(at<T>(h.x.query, h.token(first)), rows, l.dim, static_cast<int64_t>(l.heads) * l.dim, copy, q_stride);
    Softmax softmax{room.take(rows), room.take(rows), room.take(static_cast<int64_t>(rows) * l.dim)};
    attend_window(h, task, q, q_stride, first, rows, softmax, room);
    attend_cache(h, q, q_stride, rows, softmax, room);
    float* const linear = room.take(static_cast<int64_t>(rows) * l.dim);
    float* const mass = room.take(rows);
    float const* const phi = h.features(q, rows, q_stride, h.x.feature_q_weight, room);
    gemm(rows, l.dim, l.features, phi, l.features, 1, h.state(), l.dim, linear, l.dim, false);
    for (int i = 0; i < rows; ++i)
        mass[i] = dot(phi + static_cast<int64_t>(i) * l.features, h.mass(), l.features);
    if (l.sliding)
        add_window_linear(h, task, phi, first, rows, linear, mass, room);
    for (int i = 0; i < rows; ++i)
        h.mix(first + i, softmax.values + static_cast<int64_t>(i) * l.dim, softmax.total[i], linear + static_cast<int64_t>(i) * l.dim,
            mass[i]);
}

template <typename T, typename S>
void attend_part(Task const& task, int part, int parts, float* partial)
{
    Head<T, S> const h(task);
    Layer const& l = h.l;
    Room room{task.room};
    float* const copy = room.take(static_cast<int64_t>(kPartSlots > l.chunk ? kPartSlots : l.chunk) * l.dim);
    float* const q_copy = room.take(l.dim);
    int64_t stride;
    float const* const q = floats(at<T>(h.x.query, h.token(0)), 1, l.dim, l.dim, q_copy, stride);
    int const place = h.s.offset, near = l.chunk + place + 1, first = h.s.chunk > 0 ? 0 : l.chunk;
    int64_t const slot = static_cast<int64_t>(part) * kPartSlots;
    int64_t const left = h.s.held > slot ? h.s.held - slot : 0;
    int const far = static_cast<int>(left < kPartSlots ? left : kPartSlots);
    float* const logits = room.take(near);
    float* const far_logits = room.take(far);
    float* const values = room.take(l.dim);
    std::memset(values, 0, sizeof(float) * static_cast<unsigned>(l.dim));
    auto ring = [&](Kept const& base, int start, int count)
    { return kept_floats<S>(base, h.ring(start), count, l.dim, copy, stride); };
    auto cache = [&](Kept const& base) { return kept_floats<S>(base, h.cache(slot), far, l.dim, copy, stride); };
    float top = kMinusInfinity, total = 0;
    if (far)
    {
        dots(q, cache(h.x.salient_key), far, l.dim, h.factor, far_logits);
        top = largest(far_logits, far);
    }
    if (part == 0)
    {
        if (h.s.chunk > 0)
            dots(q, ring(h.x.window_key, h.previous, l.chunk), l.chunk, l.dim, h.factor, logits);
        dots(q, ring(h.x.window_key, h.current, place + 1), place + 1, l.dim, h.factor, logits + l.chunk);
        float near_top;
        attend_window_row(h, logits, near, place, nullptr, near_top, total);
        if (top > near_top) // rescales the window's terms to the common maximum
        {
            float const shrink = exponential(near_top - top);
            scale(logits + first, near - first, shrink);
            total *= shrink;
        }
        else
            top = near_top;
        if (h.s.chunk > 0)
            add_weighted(logits, ring(h.x.window_value, h.previous, l.chunk), l.chunk, l.dim, values);
        add_weighted(logits + l.chunk, ring(h.x.window_value, h.current, place + 1), place + 1, l.dim, values);
    }
    if (far)
    {
        total += exponentiate(far_logits, far, top);
        add_weighted(far_logits, cache(h.x.salient_value), far, l.dim, values);
    }
    float* const linear = room.take(l.dim);
    std::memset(linear, 0, sizeof(float) * static_cast<unsigned>(l.dim));
    float mass = 0;
    if (part == 0)
    {
        float const* const phi = h.features(q, 1, l.dim, h.x.feature_q_weight, room);
        add_weighted(phi, h.state(), l.features, l.dim, linear);
        mass = dot(phi, h.mass(), l.features);
    }
    if (parts == 1)
    {
        h.mix(0, values, total, linear, mass);
        return;
    }
    float* const out = partial + static_cast<size_t>(part) * still_cpu::hybrid::partial_size(l);
    out[0] = top, out[1] = total, out[2] = mass;
    std::memcpy(out + 3, values, sizeof(float) * static_cast<unsigned>(l.dim));
    std::memcpy(out + 3 + l.dim, linear, sizeof(float) * static_cast<unsigned>(l.dim));
}

template <typename T, typename S>
void combine(Task const& task, int parts, float const* partial)
{
    Head<T, S> const h(task);
    int const dim = h.l.dim;
    size_t const size = still_cpu::hybrid::partial_size(h.l);
    Room room{task.room};
    float* const values = room.take(dim);
    std::memset(values, 0, sizeof(float) * static_cast<unsigned>(dim));
    float top = kMinusInfinity, total = 0;
    for (int p = 0; p < parts; ++p)
        top = partial[size * static_cast<size_t>(p)] > top ? partial[size * static_cast<size_t>(p)] : top;
    for (int p = 0; p < parts; ++p)
    {
        float const* const one = partial + size * static_cast<size_t>(p);
        float const share = exponential(one[0] - top);
        total += share * one[1];
        add_weighted(&share, one + 3, 1, dim, values);
    }
    h.mix(0, values, total, partial + 3 + dim, partial[2]);
}

template <typename T>
constexpr Kernels kTable{room, promote<T, T>, attend<T, T>, attend_part<T, T>, combine<T, T>, nullptr};

// With float activations.
template <typename S>
constexpr Kernels kKept{room, promote<float, S>, attend<float, S>, attend_part<float, S>, combine<float, S>, keep<S>};

} // namespace

still_cpu::hybrid::Kernels const& still_cpu::hybrid::STILL_KERNELS(Numbers kind)
{
    switch (kind)
    {
    case Numbers::kHalf: return kTable<Half>;
    case Numbers::kFloatKeptHalf: return kKept<Half>;
    case Numbers::kFloatKeptCodes: return kKept<Code>;
    default: return kTable<float>;
    }
}
