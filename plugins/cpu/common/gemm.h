// GEMMs of a few dozen rows: the right factor is stored by row, the left one with any strides.
#pragma once

#include "simd.h"

namespace
{

// C [Rows, Width vectors] = or += A B; A is read at a[row * row_step + k * k_step].
template <int Rows, int Width>
inline void gemm_tile(
    int depth, float const* a, int64_t row_step, int64_t k_step, float const* b, int64_t b_stride, float* c, int64_t c_stride, bool add)
{
    Vec total[Rows][Width];
    for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < Width; ++j)
            total[i][j] = add ? load(c + i * c_stride + j * kLanes) : Vec{};
    for (int k = 0; k < depth; ++k)
    {
        Vec right[Width];
        for (int j = 0; j < Width; ++j)
            right[j] = load(b + k * b_stride + j * kLanes);
        for (int i = 0; i < Rows; ++i)
        {
            float const left = a[i * row_step + k * k_step];
            for (int j = 0; j < Width; ++j)
                total[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < Width; ++j)
            store(c + i * c_stride + j * kLanes, total[i][j]);
}

// a b + c, fused if vectors are: for a plain expression GCC may round some rows' products before the sum.
inline float multiply_add(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The columns that do not fill a vector.
inline void gemm_rest(int rows, int columns, int depth, float const* a, int64_t row_step, int64_t k_step, float const* b, int64_t b_stride,
    float* c, int64_t c_stride, bool add)
{
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j)
        {
            float total = add ? c[i * c_stride + j] : 0;
            for (int k = 0; k < depth; ++k)
                total = multiply_add(a[i * row_step + k * k_step], b[k * b_stride + j], total);
            c[i * c_stride + j] = total;
        }
}

template <int Rows>
inline void gemm_rows(int columns, int depth, float const* a, int64_t row_step, int64_t k_step, float const* b, int64_t b_stride, float* c,
    int64_t c_stride, bool add)
{
    int j = 0;
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
        gemm_tile<Rows, 2>(depth, a, row_step, k_step, b + j, b_stride, c + j, c_stride, add);
    for (; j + kLanes <= columns; j += kLanes)
        gemm_tile<Rows, 1>(depth, a, row_step, k_step, b + j, b_stride, c + j, c_stride, add);
    if (j < columns)
        gemm_rest(Rows, columns - j, depth, a, row_step, k_step, b + j, b_stride, c + j, c_stride, add);
}

// C [rows, columns] = (or, with `add`, +=) A [rows, depth] B [depth, columns].
inline void gemm(int rows, int columns, int depth, float const* a, int64_t row_step, int64_t k_step, float const* b, int64_t b_stride,
    float* c, int64_t c_stride, bool add)
{
    int i = 0;
    for (; i + kTileRows <= rows; i += kTileRows)
        gemm_rows<kTileRows>(columns, depth, a + i * row_step, row_step, k_step, b, b_stride, c + i * c_stride, c_stride, add);
    for (; i + 4 <= rows; i += 4)
        gemm_rows<4>(columns, depth, a + i * row_step, row_step, k_step, b, b_stride, c + i * c_stride, c_stride, add);
    for (; i + 2 <= rows; i += 2)
        gemm_rows<2>(columns, depth, a + i * row_step, row_step, k_step, b, b_stride, c + i * c_stride, c_stride, add);
    if (i < rows)
        gemm_rows<1>(columns, depth, a + i * row_step, row_step, k_step, b, b_stride, c + i * c_stride, c_stride, add);
}

typedef float Four __attribute__((vector_size(16)));

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
// Transposes four rows of four.
inline void turn(Four& a, Four& b, Four& c, Four& d)
{
    Four const ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    Four const ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ab, cd, 0, 1, 4, 5), b = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}
#else
inline void turn(Four& a, Four& b, Four& c, Four& d)
{
    Four const x[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        a[i] = x[i][0], b[i] = x[i][1], c[i] = x[i][2], d[i] = x[i][3];
}
#endif

// out[d][r] = factor * rows[r][d] for d < n, r < count; columns count .. round_up(count, kLanes) become 0.
inline void transpose(float const* rows, int count, int n, int64_t stride, float factor, float* out, int64_t out_stride)
{
    int const whole = count / 4 * 4, wide = n / 4 * 4, padded = round_up(count, kLanes);
    for (int r = 0; r < whole; r += 4)
        for (int d = 0; d < wide; d += 4)
        {
            Four x[4];
            for (int i = 0; i < 4; ++i)
                std::memcpy(&x[i], rows + (r + i) * stride + d, sizeof x[i]);
            turn(x[0], x[1], x[2], x[3]);
            for (int i = 0; i < 4; ++i)
            {
                x[i] *= factor;
                std::memcpy(out + (d + i) * out_stride + r, &x[i], sizeof x[i]);
            }
        }
    for (int d = 0; d < n; ++d)
        for (int r = d < wide ? whole : 0; r < padded; ++r)
            out[d * out_stride + r] = r < count ? factor * rows[r * stride + d] : 0;
}

} // namespace
