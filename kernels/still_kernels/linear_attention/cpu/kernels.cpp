// The tasks of linear attention. Compiled once per instruction set; STILL_KERNELS names the table.
#include "linear_attention.h"

#include "cpu/common/elements.h"
#include "cpu/common/gemm.h"

namespace
{

using namespace still_cpu::linear;

constexpr int kStepVectors = kLanes == 16 ? 8 : 4; // of a row of the state: most for which registers hold sums
constexpr float kNothing = -1000; // logarithm of a decay to zero
constexpr int kWide = (kChunk + 15) / 16 * 16; // padded to the widest vectors of any instruction set

size_t room(Layer const& l)
{
    int64_t const rows = kChunk * (1 + l.shared);
    // The arrays of a chunk, and padding for alignment.
    return static_cast<size_t>(rows * l.dim + static_cast<int64_t>(l.dim) * kWide + rows * kWide + kChunk * kChunk + rows * l.size
                               + kChunk * l.size + 3 * l.dim + l.size + l.shared + kChunk + 16 * 10);
}

// One head of one sequence.
template <typename T>
struct Head
{
    Layer const& l;
    Tensors const& x;
    int64_t row;
    int head;
    float* state; // [D, V]

    explicit Head(Task const& task) : l(*task.layer), x(*task.tensors), row(task.row), head(task.head)
    {
        state = x.state + (row * l.heads + head) * l.dim * l.size;
    }

    int64_t place(int64_t token) const { return row * x.tokens + token; }
    T const* query(int64_t token) const
    {
        return at<T>(x.query, (place(token) * l.query_groups + head / (l.heads / l.query_groups)) * l.shared * l.dim);
    }
    T const* key(int64_t token) const
    {
        return at<T>(x.key, (place(token) * l.key_heads + head / (l.heads / l.key_heads)) * l.dim);
    }
    T const* value(int64_t token) const { return at<T>(x.value, (place(token) * l.heads + head) * l.size); }
    T* output(int64_t token) const { return at<T>(x.output, (place(token) * l.heads + head) * l.shared * l.size); }
    float const* decay(int64_t token) const { return x.decay + (place(token) * l.heads + head) * l.decay; }
    float beta(int64_t token) const { return x.beta[place(token) * l.betas + (l.betas > 1 ? head : 0)]; }

    static void read(T const* from, int n, float factor, float* to)
    {
        for (int i = 0; i < n; ++i)
            to[i] = factor * to_float(from[i]);
    }
    static void write(float const* from, int n, T* to)
    {
        for (int i = 0; i < n; ++i)
            from_float(from[i], to + i);
    }

    // The recurrence. With S' = e S + k u^T, the output q S' is (q e) S + (q . k) u: one pass over the state computes all
    // products, a second one writes it.
    void step(int64_t token, Room room) const
    {
        int const dim = l.dim, size = l.size, shared = l.shared, first = l.betas ? 1 : 0, rows = first + shared;
        float *const k = room.take(dim), *const left = room.take(dim);
        float* const weights = room.take(static_cast<int64_t>(1 + shared) * dim); // for the delta rules' correction, and for each query
        float *const found = room.take(static_cast<int64_t>(1 + shared) * size), *const update = room.take(size);
        float* const direct = room.take(shared);
        read(key(token), dim, 1, k);
        read(value(token), size, 1, update);
        float const all = l.decay == 1 ? exact_exponential(static_cast<double>(decay(token)[0])) : 1;
        for (int d = 0; d < dim; ++d)
            left[d] = l.decay > 1 ? decay(token)[d] : all;
        if (l.decay > 1)
            exponentiate(left, dim, 0);
        if (l.betas)
            std::memcpy(weights, k, sizeof(float) * static_cast<unsigned>(dim));
        read(query(token), shared * dim, l.scale, weights + first * dim);
        for (int g = 0; g < shared; ++g)
            direct[g] = dot(weights + (first + g) * dim, k, dim);
        for (int r = 0; r < rows; ++r)
            for (int d = 0; d < dim; ++d)
                weights[r * dim + d] *= left[d];
        int column = 0;
        if (rows == 2)
            for (; column + kStepVectors * kLanes <= size; column += kStepVectors * kLanes)
                gemm_tile<2, kStepVectors>(dim, weights, dim, 1, state + column, size, found + column, size, false);
        gemm(rows, size - column, dim, weights, dim, 1, state + column, size, found + column, size, false);
        for (int i = 0; first && i < size; ++i)
            update[i] = beta(token) * (update[i] - found[i]);
        for (int g = 0; g < shared; ++g)
            for (int i = 0; i < size; ++i)
                found[(first + g) * size + i] += direct[g] * update[i];
        for (int d = 0; d < dim; ++d)
        {
            float* const to = state + static_cast<int64_t>(d) * size;
            float const keep = left[d], add = k[d];
            for (int i = 0; i < size; ++i)
                to[i] = keep * to[i] + add * update[i];
        }
        write(found + first * size, shared * size, output(token));
    }

    // `count` tokens at once, with one decay per token or none.
    void chunk(int64_t token, int count, Room room) const
    {
        int const dim = l.dim, size = l.size, shared = l.shared, first = l.betas ? count : 0, rows = first + count * shared;
        float *const keys = room.take(static_cast<int64_t>(kChunk) * (1 + shared) * dim), *const asked = keys + static_cast<int64_t>(count) * dim;
        float* const turned = room.take(static_cast<int64_t>(dim) * kWide);
        float* const products = room.take(static_cast<int64_t>(kChunk) * (1 + shared) * kWide);
        float* const between = room.take(kChunk * kChunk); // decay from token j to token i
        float* const found = room.take(static_cast<int64_t>(kChunk) * (1 + shared) * size);
        float *const update = room.take(static_cast<int64_t>(kChunk) * size), *const start = room.take(kChunk);
        double sums[kChunk];
        for (int i = 0; i < count; ++i)
        {
            read(key(token + i), dim, 1, keys + static_cast<int64_t>(i) * dim);
            read(query(token + i), shared * dim, l.scale, asked + static_cast<int64_t>(i) * shared * dim);
            read(value(token + i), size, 1, update + static_cast<int64_t>(i) * size);
            // One exponential for each pair: products of single decays accumulate rounding errors, which are equal for equal decays.
            float const rate = l.decay ? decay(token + i)[0] : 0;
            sums[i] = (i ? sums[i - 1] : 0) + (rate < kNothing ? kNothing : rate);
            for (int j = 0; j <= i; ++j)
                between[i * kChunk + j] = static_cast<float>(sums[i] - sums[j]);
            start[i] = exact_exponential(sums[i]);
            exponentiate(between + i * kChunk, i + 1, 0);
        }
        transpose(keys, count, dim, dim, 1, turned, kWide);
        // Rows of keys, only for the delta rules, then of queries.
        float const* const left = l.betas ? keys : asked;
        gemm(rows, round_up(count, kLanes), dim, left, dim, 1, turned, kWide, products, kWide, false);
        gemm(rows, size, dim, left, dim, 1, state, size, found, size, false);
        for (int i = 0; i < first; ++i)
        {
            float *const weights = products + i * kWide, *const to = update + static_cast<int64_t>(i) * size;
            float const b = beta(token + i), old = start[i];
            float const* const known = found + static_cast<int64_t>(i) * size;
            for (int n = 0; n < size; ++n)
                to[n] = b * (to[n] - old * known[n]);
            for (int j = 0; j < i; ++j)
                weights[j] *= -b * between[i * kChunk + j];
            add_weighted(weights, update, i, size, to);
        }
        for (int i = 0; i < count; ++i)
            for (int g = 0; g < shared; ++g)
            {
                int const r = first + i * shared + g;
                float* const weights = products + r * kWide;
                for (int j = 0; j < count; ++j)
                    weights[j] = j <= i ? weights[j] * between[i * kChunk + j] : 0;
                scale(found + static_cast<int64_t>(r) * size, size, start[i]);
            }
        float* const out = found + static_cast<int64_t>(first) * size;
        gemm(count * shared, size, count, products + first * kWide, kWide, 1, update, size, out, size, true);
        for (int i = 0; i < count; ++i)
            write(out + static_cast<int64_t>(i) * shared * size, shared * size, output(token + i));
        for (int j = 0; j < count; ++j)
            scale(keys + static_cast<int64_t>(j) * dim, dim, between[(count - 1) * kChunk + j]);
        if (l.decay)
            scale(state, dim * size, start[count - 1]);
        gemm(dim, size, count, keys, 1, dim, update, size, state, size, true);
    }
};

template <typename T>
void run(Task const& task)
{
    Head<T> const head(task);
    Layer const& l = *task.layer;
    bool const by_token = l.decay > 1 || task.count < kLeastChunked;
    for (int64_t token = 0; token < task.count;)
    {
        int const count = by_token ? 1 : static_cast<int>(task.count - token < kChunk ? task.count - token : kChunk);
        if (by_token)
            head.step(token, {task.room});
        else
            head.chunk(token, count, {task.room});
        token += count;
    }
}

template <typename T>
constexpr Kernels kTable{room, run<T>};

} // namespace

still_cpu::linear::Kernels const& still_cpu::linear::STILL_KERNELS(Numbers kind)
{
    return kind == Numbers::kHalf ? kTable<Half> : kTable<float>;
}
