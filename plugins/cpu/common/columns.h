// Softmax of a block of queries that lie column by column, so that maxima and sums run over whole vectors.
#pragma once

#include "elements.h"
#include "gemm.h"

namespace
{

// The scaled queries of `count` tokens, [dim, columns], `group` rows of each side by side and `apart` numbers from one token to the next;
// `dense` has room for them as they are. Columns are filled up to `wide` with zeros.
template <typename T>
inline float const* turned_queries(T const* first, int64_t apart, int count, int group, int dim, int64_t wide, float* dense, float* turned)
{
    for (int i = 0; i < count; ++i)
    {
        float* const to = dense + static_cast<int64_t>(i) * group * dim;
        int64_t stride;
        float const* const from = floats(first + i * apart, group, dim, dim, to, stride);
        if (from != to)
            std::memcpy(to, from, sizeof(float) * static_cast<unsigned>(group * dim));
    }
    std::memset(turned, 0, sizeof(float) * static_cast<uint64_t>(wide) * static_cast<unsigned>(dim));
    transpose(dense, count * group, dim, dim, 1 / __builtin_sqrtf(static_cast<float>(dim)), turned, wide);
    return turned;
}

// Maxima and sums [columns] and weighted values [dim, columns] of nothing; `columns` are whole vectors.
inline void begin_columns(int columns, int dim, float* top, float* total, float* values)
{
    std::memset(total, 0, sizeof(float) * static_cast<unsigned>(columns));
    std::memset(values, 0, sizeof(float) * static_cast<uint64_t>(columns) * static_cast<unsigned>(dim));
    for (int c = 0; c < columns; ++c)
        top[c] = kMinusInfinity;
}

// Logits [count, columns] become e^(logit - maximum); what was summed so far moves to the new maximum.
inline void absorb(float* logits, int count, int columns, int dim, float* top, float* total, float* values)
{
    for (int c = 0; c < columns; c += kLanes)
    {
        Vec const before = load(top + c);
        Vec most = before;
        for (int j = 0; j < count; ++j)
            most = larger(most, load(logits + static_cast<int64_t>(j) * columns + c));
        store(top + c, most);
        // A column that has seen no key yet stays at -inf; its terms are 0.
        Vec const pivot = larger(most, spread(-3e38f));
        Vec sum = {};
        for (int j = 0; j < count; ++j)
        {
            float* const at = logits + static_cast<int64_t>(j) * columns + c;
            Vec const e = exponential(load(at) - pivot);
            sum += e;
            store(at, e);
        }
        Vec const shrink = exponential(before - pivot);
        store(total + c, load(total + c) * shrink + sum);
        for (int d = 0; d < dim; ++d)
        {
            float* const at = values + static_cast<int64_t>(d) * columns + c;
            store(at, load(at) * shrink);
        }
    }
}

} // namespace
