// Softmax of a block of queries stored by column, so that maxima and sums use whole vectors.
#pragma once

#include "elements.h"
#include "gemm.h"

namespace
{

// The scaled queries of `count` tokens, [dim, columns]. A token has `group` consecutive rows; tokens are `apart` numbers apart.
// `dense` has room for a row-wise copy. Columns are padded with zeros to `wide`.
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

// Initial maxima and sums [columns] and weighted values [dim, columns]; `columns` fill whole vectors.
inline void begin_columns(int columns, int dim, float* top, float* total, float* values)
{
    std::memset(total, 0, sizeof(float) * static_cast<unsigned>(columns));
    std::memset(values, 0, sizeof(float) * static_cast<uint64_t>(columns) * static_cast<unsigned>(dim));
    for (int c = 0; c < columns; ++c)
        top[c] = kMinusInfinity;
}

// Logits [count, columns] become e^(logit - maximum); earlier sums are rescaled to the new maximum.
inline void absorb(float* logits, int count, int columns, int dim, float* top, float* total, float* values)
{
    for (int c = 0; c < columns; c += kLanes)
    {
        Vec const before = load(top + c);
        Vec most = before;
        for (int j = 0; j < count; ++j)
            most = larger(most, load(logits + static_cast<int64_t>(j) * columns + c));
        store(top + c, most);
        // A column without any key stays at -inf; its terms are 0.
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
