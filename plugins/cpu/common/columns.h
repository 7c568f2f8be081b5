// Softmax of a block of queries that lie column by column, so that maxima and sums run over whole vectors.
#pragma once

#include "simd.h"

namespace
{

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
