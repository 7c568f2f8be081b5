// One head of one sequence in a step: location of its data, its features, its share of the linear state, its output.
#pragma once

#include "cpu/common/elements.h"
#include "features.h"

namespace
{

using still_cpu::Kept;
using still_cpu::hybrid::Piece;
using still_cpu::hybrid::Task;
using still_cpu::hybrid::Tensors;

// Data of one head of one sequence; S is the type of window and cache.
template <typename T, typename S>
struct Head
{
    Layer const& l;
    Tensors const& x;
    Piece const& s;
    int head, kv_head, current, previous; // current, previous: first slot of the chunks in the ring
    float factor;                         // of logits

    explicit Head(Task const& task)
        : l(*task.layer), x(*task.tensors), s(*task.piece), head(task.head), kv_head(task.head / l.group()),
          current(static_cast<int>(s.chunk % 2) * l.chunk), previous(l.chunk - current),
          factor(1 / __builtin_sqrtf(static_cast<float>(l.dim)))
    {
    }

    int64_t token(int i) const { return ((s.row * x.tokens + s.token + i) * l.heads + head) * l.dim; }
    int64_t of_head() const { return static_cast<int64_t>(s.row) * l.heads + head; }
    int64_t ring(int slot) const { return (static_cast<int64_t>(s.row) * l.kv_heads + kv_head) * 2 * l.chunk + slot; }
    int64_t cache(int64_t slot) const
    {
        int const own = l.scope == still_cpu::hybrid::Scope::kHead ? head : kv_head;
        return (static_cast<int64_t>(s.row) * l.select_heads() + own) * l.slots + slot;
    }
    T const* weight(void const* base) const { return at<T>(base, l.weight_heads == 1 ? 0 : static_cast<int64_t>(head) * l.rows * l.dim); }
    float* state() const { return x.kv_state + of_head() * l.features * l.dim; }
    float* mass() const { return x.z_state + of_head() * l.features; }
    float* scores() const { return x.window_score + of_head() * 2 * l.chunk + current; }

    // out = (factor * softmax numerator + gate * linear numerator) / (factor * softmax sum + linear mass + epsilon)
    void mix(int i, float const* softmax, float total, float const* linear, float linear_mass) const
    {
        float const window = x.window_factor ? x.window_factor[head] : 1.0f;
        float const share = 1 / (window * total + linear_mass + l.epsilon);
        T* const out = at<T>(x.output, token(i));
        T const* const gate = x.gate ? at<T>(x.gate, token(i)) : nullptr;
        for (int d = 0; d < l.dim; ++d)
        {
            float const far = gate ? to_float(gate[d]) * linear[d] : linear[d];
            from_float((window * softmax[d] + far) * share, out + d);
        }
    }

    // phi of `count` rows, [count, F].
    float* features(float const* rows, int count, int64_t stride, void const* weights, Room& room) const
    {
        int const wide = round_up(l.rows, kLanes);
        float* const phi = room.take(static_cast<int64_t>(count) * l.features);
        Room rest = room;
        float* const direction = rest.take(static_cast<int64_t>(count) * wide);
        T const* const w = weight(weights);
        int64_t w_stride;
        if (count == 1)
            dots(rows, floats(w, l.rows, l.dim, l.dim, rest.next, w_stride), l.rows, l.dim, 1, direction);
        else
        {
            float* const turned = rest.take(static_cast<int64_t>(l.dim) * wide);
            float const* const dense = floats(w, l.rows, l.dim, l.dim, rest.next, w_stride);
            transpose(dense, l.rows, l.dim, w_stride, 1, turned, wide);
            gemm(count, wide, l.dim, rows, stride, 1, turned, wide, direction, wide, false);
        }
        for (int i = 0; i < count; ++i)
        {
            float const* const row = rows + i * stride;
            map_row(l, direction + static_cast<int64_t>(i) * wide, __builtin_sqrtf(dot(row, row, l.dim)),
                phi + static_cast<int64_t>(i) * l.features);
        }
        return phi;
    }

    // Adds `count` keys and values to the linear state, except marked ones.
    void add_linear(Kept const& keys, Kept const& values, int64_t first, int count, uint8_t const* except, Room room) const
    {
        int64_t k_stride, v_stride;
        float const* const v = kept_floats<S>(values, first, count, l.dim, room.take(static_cast<int64_t>(count) * l.dim), v_stride);
        float const* const k = kept_floats<S>(keys, first, count, l.dim, room.take(static_cast<int64_t>(count) * l.dim), k_stride);
        float* const phi = features(k, count, k_stride, x.feature_k_weight, room);
        float* const z = mass();
        if (except)
            for (int i = 0; i < count; ++i)
                if (except[i])
                    std::memset(phi + static_cast<int64_t>(i) * l.features, 0, sizeof(float) * static_cast<unsigned>(l.features));
        for (int f = 0; f < l.features; ++f) // sum the additions first: otherwise each rounds at the total's last place
        {
            float sum = 0;
            for (int i = 0; i < count; ++i)
                sum += phi[static_cast<int64_t>(i) * l.features + f];
            z[f] += sum;
        }
        gemm(l.features, l.dim, count, phi, 1, l.features, v, v_stride, state(), l.dim, true);
    }
};

} // namespace
