// Tiles of eight interleaved outputs with integer scales (super_block in the OpSpec): a lane is an output; AVX-512 has two tiles. Compiled
// once per instruction set, like ../common/simd.h.
//
// Sums of a unit of a token are exact integers, and one token uses the same loop as several: a token's numbers do not depend on
// the others. Each code is unpacked once for up to kChunk tokens and stays in registers for all of them.
#pragma once

#include "cpu/common/elements.h"
#include "matmul_nbits.h"

namespace
{

constexpr int kPart = kUnit; // inputs whose codes are in registers at once

constexpr int kPieces = kLanes < kTile ? kTile / kLanes : 1; // of a tile
constexpr int kOutputs = kPieces * kLanes;

typedef uint8_t Codes __attribute__((vector_size(4 * kLanes))); // four inputs of each output

template <typename T>
inline T read(void const* from)
{
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Location of a tile's part, and of the next tile's.
struct Place
{
    uint8_t const *first, *second;

    Place operator+(int64_t bytes) const { return {first + bytes, second + bytes}; }
};

inline Codes read_codes(Place from)
{
#if defined(__AVX512BW__)
    return (Codes)_mm512_inserti64x4(_mm512_castsi256_si512(read<__m256i>(from.first)), read<__m256i>(from.second), 1);
#else
    return read<Codes>(from.first);
#endif
}

// kLanes bytes, signed or not.
template <typename Byte>
inline VecInt widened(Place place)
{
    uint8_t const* const from = place.first;
#if defined(__AVX512BW__)
    __m128i const bytes = _mm_set_epi64x(read<int64_t>(place.second), read<int64_t>(from));
    return (VecInt)(static_cast<Byte>(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__) // compilers convert element by element
    __m128i const bytes = _mm_loadl_epi64(reinterpret_cast<__m128i const*>(from));
    return (VecInt)(static_cast<Byte>(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#elif defined(__aarch64__)
    return (VecInt)widened_four<Byte>(from);
#else
    typedef Byte Narrow __attribute__((vector_size(kLanes)));
    return __builtin_convertvector(read<Narrow>(from), VecInt);
#endif
}

// Scales in the layout of `dot`.
#if defined(__AVX512BW__)
typedef Vec Scales;

inline Scales laid(VecInt scales)
{
    return (Vec)_mm512_cvtepi32_ps((__m512i)scales);
}
#else
typedef VecInt Scales;

inline Scales laid(VecInt scales)
{
#if defined(__AVX2__) // twice in each lane
    return (scales & 0xffff) | (scales << 16);
#else
    return scales;
#endif
}
#endif

// Codes of kPart inputs of kLanes outputs, and the scales of their blocks.
template <int Bits>
struct Part
{
    Codes codes[kPart / 4];
    Scales scales[Bits == 4 ? 1 : 2];
};

// Bytes of a tile's super-block: integer scales, codes.
template <int Bits>
constexpr int kScaleBytes = 16 * kTile;
template <int Bits>
constexpr int kSuperBytes = kScaleBytes<Bits> + kSuper * kTile * Bits / 8;

template <int Bits>
inline void unpack(Place super_block, int part, int piece, Part<Bits>& to)
{
    Place from = super_block + kScaleBytes<Bits> + part * (kPart * kTile * Bits / 8) + 4 * kLanes * piece;
    super_block = super_block + kLanes * piece;
    if constexpr (Bits == 4)
    {
        for (int i = 0; i < 4; ++i)
        {
            Codes const both = read_codes(from + 32 * i);
            to.codes[2 * i] = both & 15, to.codes[2 * i + 1] = both >> 4;
        }
        to.scales[0] = laid(widened<uint8_t>(super_block + part * kTile));
    }
    else
        for (int block = 0; block < 2; ++block, from = from + 96)
        {
            Codes const first = read_codes(from), second = read_codes(from + 32), high = read_codes(from + 64);
            Codes* const codes = to.codes + 4 * block;
            codes[0] = (first & 15) | (high << 4 & 0x30), codes[1] = first >> 4 | (high << 2 & 0x30);
            codes[2] = (second & 15) | (high & 0x30), codes[3] = second >> 4 | (high >> 2 & 0x30);
            to.scales[block] = laid(widened<int8_t>(super_block + (2 * part + block) * kTile));
        }
}

// Sums over a part: codes times a token's numbers times scales.
#if defined(__AVX512BW__)

template <int Bits>
inline Vec dot(Part<Bits> const& part, int8_t const* x)
{
    VecInt halves[2] = {}; // of the inputs; 6-bit weights have blocks of these sizes
    for (int i = 0; i < kPart / 8; ++i)
        for (int half = 0; half < 2; ++half) // an instruction of AVX-512 VNNI, which selects this set
        {
            int const four = half * kPart / 8 + i;
            asm("vpdpbusd %2%{1to16%}, %1, %0"
                : "+v"(halves[half])
                : "v"(part.codes[four]), "m"(*reinterpret_cast<int8_t const(*)[4]>(x + 4 * four)));
        }
    // Products with scales are below 2^24, and exact.
    auto const number = [](VecInt x) { return (Vec)_mm512_cvtepi32_ps((__m512i)x); };
    if constexpr (Bits == 4)
        return number(halves[0] + halves[1]) * part.scales[0];
    else
        return number(halves[1]) * part.scales[1] + number(halves[0]) * part.scales[0];
}

#elif defined(__AVX2__)

template <int Bits>
inline Vec dot(Part<Bits> const& part, int8_t const* x)
{
    auto const four = [&](int i) { return _mm256_maddubs_epi16((__m256i)part.codes[i], _mm256_set1_epi32(read<int32_t>(x + 4 * i))); };
    auto const eight = [&](int i) { return _mm256_add_epi16(four(i), four(i + 1)); }; // for codes below 64, sums fit 16 bits
    if constexpr (Bits == 4)
    {
        // For codes below 16, sums of 32 inputs also fit.
        __m256i const sums = _mm256_add_epi16(_mm256_add_epi16(eight(0), eight(2)), _mm256_add_epi16(eight(4), eight(6)));
        return (Vec)_mm256_cvtepi32_ps(_mm256_madd_epi16(sums, (__m256i)part.scales[0]));
    }
    else
    {
        auto const scaled = [&](int i) { return (VecInt)_mm256_madd_epi16(eight(i), (__m256i)part.scales[i / 4]); };
        return (Vec)_mm256_cvtepi32_ps((__m256i)((scaled(0) + scaled(2)) + (scaled(4) + scaled(6))));
    }
}

#else

template <int Bits>
inline Vec dot(Part<Bits> const& part, int8_t const* x)
{
    VecInt total = {};
    constexpr int blocks = Bits == 4 ? 1 : 2, groups = kPart / 4 / blocks;
    for (int block = 0; block < blocks; ++block)
    {
#if defined(__aarch64__)
        VecInt const sums = (VecInt)four_sums<groups>(part.codes + groups * block, x + 4 * groups * block);
#else
        VecInt sums = {};
        for (int i = groups * block; i < groups * (block + 1); ++i)
        {
            VecInt const words = (VecInt)part.codes[i];
            for (int j = 0; j < 4; ++j)
                sums += (words >> 8 * j & 255) * x[4 * i + j];
        }
#endif
        total += sums * part.scales[block];
    }
    return __builtin_convertvector(total, Vec);
}

#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Codes in the layout of `pair_dot`: eight consecutive inputs of an output.
template <int Bits>
inline Part<Bits> paired(Part<Bits> const& part)
{
    Part<Bits> to = part;
    for (int i = 0; i < kPart / 4; i += 2)
    {
        int32x4_t const a = (int32x4_t)part.codes[i], b = (int32x4_t)part.codes[i + 1];
        to.codes[i] = (Codes)vzip1q_s32(a, b), to.codes[i + 1] = (Codes)vzip2q_s32(a, b);
    }
    return to;
}

// `dot` for two tokens, `x` and the one `distance` after it.
template <int Bits>
inline void pair_dot(Part<Bits> const& part, int8_t const* x, int64_t distance, VecInt* found)
{
    constexpr int blocks = Bits == 4 ? 1 : 2, groups = kPart / 4 / blocks;
    found[0] = found[1] = VecInt{};
    for (int block = 0; block < blocks; ++block)
    {
        Sums sums[2];
        pair_sums<groups>(part.codes + groups * block, x + 4 * groups * block, distance, sums);
        for (int t = 0; t < 2; ++t)
            found[t] += (VecInt)sums[t] * part.scales[block];
    }
}

#endif

// One number for each output; those of the next tile are `apart` further.
inline Vec numbers_of(Half const* from, int64_t apart)
{
#if defined(__AVX512BW__)
    return (Vec)_mm512_cvtph_ps(_mm256_set_m128i(read<__m128i>(from + apart), read<__m128i>(from)));
#elif defined(__F16C__)
    (void)apart;
    return (Vec)_mm256_cvtph_ps(read<__m128i>(from));
#else
    (void)apart;
    Vec found;
    for (int i = 0; i < kLanes; ++i)
        found[i] = to_float(from[i]);
    return found;
#endif
}

// Rounds a unit of a token, and sums its dequantized numbers by block. `rest` is what rounding leaves.
inline void round_part(float const* x, int block, int8_t* codes, float* factor, float* sums, float* rest)
{
    float const inverse = inverse_of(*factor = step_of(x));
    for (int begin = 0; begin < kPart; begin += block)
    {
        VecInt total = {};
        for (int i = begin; i < begin + block; i += kLanes)
        {
            VecInt const code = nearest(load(x + i) * inverse);
            total += code;
            for (int j = 0; j < kLanes; ++j)
                codes[i + j] = static_cast<int8_t>(code[j]);
            Vec const left = load(x + i) - *factor * __builtin_convertvector(code, Vec);
            std::memcpy(rest + i, &left, sizeof left);
        }
        int32_t whole = 0;
        for (int i = 0; i < kLanes; ++i)
            whole += total[i];
        sums[begin / block] = *factor * static_cast<float>(whole);
    }
}

// Tokens of the chunk that starts at `begin`, among those rounded at once.
inline int chunk_tokens(Rounded const& rounded, int64_t begin)
{
    return static_cast<int>(rounded.tokens - begin < kChunk ? rounded.tokens - begin : kChunk);
}

void round_tokens(Task const& task)
{
    Layer const& layer = *task.layer;
    Rounded const &to = *task.rounded, &rest = *to.rest;
    int64_t const supers = layer.inputs / kSuper;
    for (int64_t t = 0; t < task.tokens; ++t)
    {
        float const* const x = at<float>(task.tensors->input, (task.token + t) * layer.inputs);
        float const limit = outlier_step(x, layer.inputs);
        int64_t const begin = (to.first + t) / kChunk * kChunk;
        for (int64_t s = 0; s < supers; ++s)
        {
            int64_t const place = begin * supers + s * chunk_tokens(to, begin) + (to.first + t - begin);
            int outliers = 0;
            for (int64_t i = place * kSuper; i < (place + 1) * kSuper; i += kPart)
            {
                float left[kPart], last[kPart];
                round_part(x + s * kSuper + i - place * kSuper, layer.block, to.codes + i, to.factors + i / kPart,
                    to.sums + i / layer.block, left);
                if (to.factors[i / kPart] > limit)
                {
                    round_part(left, layer.block, rest.codes + i, rest.factors + i / kPart, rest.sums + i / layer.block, last);
                    outliers |= 1 << (i - place * kSuper) / kPart;
                }
                else
                    std::memset(rest.sums + i / layer.block, 0, sizeof(float) * static_cast<size_t>(kPart / layer.block));
            }
            rest.outliers[place] = static_cast<uint8_t>(outliers);
        }
    }
}

// Adds the products of `several` tokens, or of what rounding left of their units with an outlier, to outputs of `tiles` tiles; `One`: of
// one token, whose sums stay in registers. Of the rest only parts and tokens with an outlier cost more than a look at their marks.
template <int Bits, bool One, bool Rest>
inline void add_tile(
    Task const& task, Rounded const& tokens, int64_t row, int tiles, int64_t token, int several, Vec (*totals)[kPieces])
{
    constexpr int blocks = Bits == 4 ? 8 : 16, parts = kSuper / kPart, most = One ? 1 : kChunk;
    Layer const& layer = *task.layer;
    int const count = One ? 1 : several;
    int64_t const supers = layer.inputs / kSuper, numbers = (Bits == 4 ? 2 : 1) * kTile;
    int64_t const bytes = supers * kSuperBytes<Bits>, apart = (tiles - 1) * supers * numbers;
    uint8_t const* const begin = task.tensors->blocks + row * layer.row_bytes();
    Place from{begin, begin + (tiles - 1) * bytes};
    uint8_t const *ahead = begin + groups_ahead(tiles * bytes) * tiles * bytes, *asked = ahead;
    Half const* scales = at<Half>(task.tensors->scales, row * supers * numbers / kTile);
    Vec sums[most][kPieces];
    for (int64_t super = 0; super < supers; ++super, from = from + kSuperBytes<Bits>, scales += numbers)
    {
        int64_t const place = token * supers + super * count;
        int8_t const* const x = tokens.codes + place * kSuper;
        float const* const factors = tokens.factors + place * parts;
        uint8_t const* const outliers = Rest ? tokens.outliers + place : nullptr;
        int chosen[Rest ? most : 1], left = count; // tokens of this pass
        unsigned marks = 0;                        // of their parts
        if constexpr (Rest)
        {
            left = 0;
            for (int t = 0; t < count; ++t)
                if (outliers[t])
                    chosen[left++] = t, marks |= outliers[t];
            if (!marks)
                continue;
        }
        auto const of_pass = [&](int i) { return Rest && !One ? chosen[i] : i; };
        for (int i = 0; i < left; ++i)
            for (Vec& sum : sums[of_pass(i)])
                sum = Vec{};
        for (int i = 0; i < parts; ++i)
        {
            if constexpr (!Rest)
            {
                for (uint8_t const* const end = ahead + tiles * kSuperBytes<Bits> / parts; asked < end; asked += 64)
                    __builtin_prefetch(asked);
                ahead += tiles * kSuperBytes<Bits> / parts;
            }
            else if (!(marks >> i & 1))
                continue;
            Part<Bits> unpacked[kPieces];
            for (int piece = 0; piece < kPieces; ++piece)
                unpack(from, i, piece, unpacked[piece]);
            int first = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
            if (!Rest && count > 1)
            {
                Part<Bits> const pairs[kPieces] = {paired(unpacked[0]), paired(unpacked[1])};
                for (; first + 1 < count; first += 2)
                    for (int piece = 0; piece < kPieces; ++piece)
                    {
                        VecInt found[2];
                        pair_dot(pairs[piece], x + first * kSuper + i * kPart, kSuper, found);
                        for (int j = 0; j < 2; ++j)
                            sums[first + j][piece] += __builtin_convertvector(found[j], Vec) * factors[(first + j) * parts + i];
                    }
            }
#endif
            for (int j = first; j < left; ++j)
            {
                int const t = of_pass(j);
                if (Rest && !(outliers[t] >> i & 1))
                    continue;
                for (int piece = 0; piece < kPieces; ++piece)
                    sums[t][piece] += dot(unpacked[piece], x + t * kSuper + i * kPart) * factors[t * parts + i];
            }
        }
        for (int piece = 0; piece < kPieces; ++piece)
        {
            // For Q4_K the offsets; for Q6_K the part of code 32, which means 0.
            Vec others[blocks];
            for (int i = 0; i < blocks; ++i)
                if constexpr (Bits == 4)
                    others[i] = __builtin_convertvector(widened<uint8_t>(from + (8 + i) * kTile + piece * kLanes), Vec);
                else
                    others[i] = __builtin_convertvector(32 * widened<int8_t>(from + i * kTile + piece * kLanes), Vec);
            Half const* const own = scales + piece * kLanes;
            Vec const scale = numbers_of(own, apart), least = Bits == 4 ? numbers_of(own + kTile, apart) : scale;
            for (int j = 0; j < left; ++j)
            {
                int const t = of_pass(j);
                float const* const of_blocks = tokens.sums + (place + t) * blocks;
                Vec even = {}, odd = {};
                for (int i = 0; i < blocks; i += 2)
                    even += others[i] * of_blocks[i], odd += others[i + 1] * of_blocks[i + 1];
                totals[t][piece] += sums[t][piece] * scale;
                totals[t][piece] -= (even + odd) * least;
            }
        }
    }
}

template <int Bits, bool One>
void multiply_tile(Task const& task, int64_t row, int tiles, int64_t token, int several)
{
    int const count = One ? 1 : several;
    Vec totals[One ? 1 : kChunk][kPieces];
    for (int t = 0; t < count; ++t)
        for (Vec& total : totals[t])
            total = Vec{};
    add_tile<Bits, One, false>(task, *task.rounded, row, tiles, token, count, totals);
    add_tile<Bits, One, true>(task, *task.rounded->rest, row, tiles, token, count, totals);
    for (int t = 0; t < count; ++t)
        std::memcpy(at<float>(task.tensors->output, (task.token + token + t) * task.layer->outputs + row), totals[t],
            sizeof(float) * static_cast<size_t>(tiles * kTile));
}

template <int Bits>
void multiply_tiles(Task const& task)
{
    constexpr int most = kOutputs / kTile;
    int64_t const end = task.row + task.rows;
    for (int64_t row = task.row; row < end; row += kOutputs)
        for (int64_t token = 0; token < task.tokens; token += kChunk)
        {
            int const count = chunk_tokens(*task.rounded, token), tiles = end - row < kOutputs ? 1 : most;
            (count == 1 ? multiply_tile<Bits, true> : multiply_tile<Bits, false>)(task, row, tiles, token, count);
        }
}

void multiply_tiles(Task const& task)
{
    (task.layer->bits == 4 ? multiply_tiles<4> : multiply_tiles<6>)(task);
}

} // namespace
