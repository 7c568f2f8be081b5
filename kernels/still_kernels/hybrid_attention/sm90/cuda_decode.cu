// One token per row on sm_90: a cluster of CL blocks shares the cache, the window and S of GR query heads; the first block merges.
//
// Blocks of a cluster hand each other directions, features and partial results through distributed shared memory, so that nothing of a
// step takes the way through L2, and nobody waits for a counter but the last head of a promoting step, which writes the token where
// others read. One warp copies 8 KiB a stage into a ring of NST stages, eight warps work. Rows of the cache and of the window lie in a
// stage as keys, then values; rows of S as those of FEATS features, those of their negatives, and z of both.
//
// cuda_decode.py has the arguments and the macros. T16: 0 float16, 1 bfloat16; LONG: counts in 64 bits; FEATURE, SCOPE as in
// triton_common.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
#if LONG
typedef long long Count;
#else
typedef int Count;
#endif

namespace {
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STAGE = 8192;
constexpr int LANES = D / 8;                      // that hold a row in 16 bits, 16 bytes each
constexpr int ROWS = 32 / LANES;                  // rows that a warp takes at a time
constexpr int SLOTS = STAGE / (4 * D);            // of a stage
constexpr int FEATS = STAGE / (8 * D);            // of a stage
constexpr int FSTAGES = P / FEATS;                // stages of one head's S
constexpr int SSTAGES = GR * FSTAGES;
constexpr int MINE = (SSTAGES + CL - 1) / CL;     // of them a block's
constexpr int WSLOTS = 2 * C / CL < SLOTS ? 2 * C / CL : SLOTS;
constexpr int WSTAGES = 2 * C / WSLOTS;
constexpr int ZROOM = 128;                       // behind a stage: z of its features
constexpr int KEYS = C + 8;                       // a row of key features, so that rows lie in other banks
constexpr float FAR = -1e30f, LOG2E = 1.4426950408889634f, FLOOR = 1e-12f;
static_assert(C == 64 && (D == 64 || D == 128) && (P == 64 || P == 128) && GR <= 2 && FEATS <= 16, "");

struct Shared {
    alignas(128) unsigned char ring[NST][STAGE + ZROOM];
    float sums[CL][GR][D], linear[CL][GR][D];     // of the first block: what the blocks found
    union {
        struct {
            float warp_sums[WARPS][GR][D], warp_linear[WARPS][GR][D];
        };
        struct {
            float key_direction[8][P];            // of 8 keys at a time
            u16 tile[2 * P][8];                   // their features
        };
    };
    float direction[GR][P];                       // of the queries
    u16 phi_k[MINE][2 * FEATS][KEYS];             // of the promoted chunk's keys, 0 where selected
    float phi[GR][2 * P];
    float few[CL][GR][6], warp_few[WARPS][GR][6]; // maximum, sum, mass, maximum and sum of the window
    float own[GR];
    u32 selected[2];
    alignas(16) float scores[C];                  // so that the compiler reads none of the words before
    unsigned char tokens[C];                      // the selected ones, in order
    int last;
    u64 full[NST], empty[NST], directions, features, parts;
};

__device__ __forceinline__ u32 place(void const* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(place(b)), "r"(n)); }
__device__ __forceinline__ void barrier_expect(u64* b, int n)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(place(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(place(b)) : "memory"); }
__device__ __forceinline__ void barrier_wait(u64* b, int phase)
{
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" ::"r"(place(b)),
                 "r"(phase)
                 : "memory");
}
__device__ __forceinline__ void peers_wait(u64* b, int phase)
{
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra AGAIN;\n}" ::"r"(place(b)),
                 "r"(phase)
                 : "memory");
}
__device__ __forceinline__ void copy(void* to, void const* from, int bytes, u64* b, u64 policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(place(to)),
                 "l"(from), "r"(bytes), "r"(place(b)), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void ahead(void const* from, int bytes) // to L2
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
__device__ __forceinline__ u32 at_rank(void const* p, int rank)
{
    u32 found;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(place(p)), "r"(rank));
    return found;
}
__device__ __forceinline__ void put(u32 to, float x, u32 b)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(x)), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void put4(u32 to, uint4 x, u32 b)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); } // of the warps that work
__device__ __forceinline__ float one(u16 x)
{
#if T16
    return __uint_as_float((u32)x << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}
__device__ __forceinline__ float2 two(u32 x)
{
#if T16
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
    return make_float2(one((u16)x), one((u16)(x >> 16)));
#endif
}
__device__ __forceinline__ u16 half_of(float x)
{
    u16 y;
#if T16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
    return y;
}
__device__ __forceinline__ void eight(uint4 x, float* y)
{
    float2 const a = two(x.x), b = two(x.y), c = two(x.z), d = two(x.w);
    y[0] = a.x, y[1] = a.y, y[2] = b.x, y[3] = b.y, y[4] = c.x, y[5] = c.y, y[6] = d.x, y[7] = d.y;
}
__device__ __forceinline__ void multiply(float (&c)[4], u32 const (&a)[4], u32 b0, u32 b1)
{
#if T16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float sum_of_warp(float x)
{
#pragma unroll
    for (int o = 16; o; o /= 2)
        x += __shfl_xor_sync(~0u, x, o);
    return x;
}
__device__ __forceinline__ float most_of_warp(float x)
{
#pragma unroll
    for (int o = 16; o; o /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

// Features of one head's direction, which a warp has in P / 32 values a lane; plus and minus of them.
__device__ __forceinline__ void features_of(float const* direction, u16 const* row, int lane, float (&plus)[P / 32], float (&minus)[P / 32])
{
    float x[P / 32], square = 0, norm = 0, most = -3e38f, least = 3e38f;
#pragma unroll
    for (int j = 0; j < D / 32; j++)
    {
        float const y = one(row[j * 32 + lane]);
        square += y * y;
    }
#pragma unroll
    for (int i = 0; i < P / 32; i++)
    {
        x[i] = direction[i * 32 + lane];
        norm += x[i] * x[i];
        most = fmaxf(most, x[i]);
        least = fminf(least, x[i]);
    }
    most = most_of_warp(most);
    least = -most_of_warp(-least);
    float by = LOG2E;
    if (FEATURE == 0)
        by = LOG2E * sqrtf(sum_of_warp(square)) / fmaxf(sqrtf(sum_of_warp(norm)), FLOOR);
    float a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < P / 32; i++)
    {
        a += plus[i] = exp2f((x[i] - most) * by);
        b += minus[i] = exp2f((least - x[i]) * by);
    }
    a = 1.f / sum_of_warp(a);
    b = 1.f / sum_of_warp(b);
#pragma unroll
    for (int i = 0; i < P / 32; i++)
    {
        plus[i] = fmaxf(plus[i] * a, FLOOR);
        minus[i] = fmaxf(minus[i] * b, FLOOR);
    }
}

// A running softmax over rows: with two heads lanes of even number keep maximum and sum of the first, the others of the second.
struct Softmax {
    float q[GR][8], sums[GR][8], most, total, window_most, window_total;
};

// Rows of a stage: slots first + row of the ring (WINDOW, where `end` is the length), or of the cache below `end`.
template <bool WINDOW>
__device__ __forceinline__ void absorb(Softmax& s, unsigned char const* stage, int slots, int first, int end, int low, bool promoting,
                                       u32 const* selected, int warp, int lane)
{
    constexpr int EACH = SLOTS / WARPS / ROWS;
    int const part = lane % LANES;
    bool const second = GR == 2 && (lane & 1);
#pragma unroll
    for (int i = 0; i < EACH; i++)
    {
        int const turn = (i * WARPS + warp) * ROWS, row = turn + lane / LANES;
        if (WINDOW && turn >= slots)
            break;
        uint4 const packed_key = *(uint4 const*)(stage + row * (2 * D) + part * 16);
        uint4 const packed_value = *(uint4 const*)(stage + (slots + row) * (2 * D) + part * 16);
        bool in = first + row < end, near = false;
        if (WINDOW)
        {
            int const position = end - 1 - ((end - 1 - (first + row)) & (2 * C - 1)), old = position - (low - C);
            in = position >= 0 && position >= low;
            near = in && position > end - C;
            if (promoting && old >= 0 && old < C)
                in = selected[old / 32] >> (old % 32) & 1;
        }
        float k[8], v[8];
        eight(packed_key, k);
        eight(packed_value, v);
        if (WINDOW || first + SLOTS > end)
        {
#pragma unroll
            for (int j = 0; j < 8; j++)
                v[j] = in ? v[j] : 0.f;
        }
        float x[GR];
#pragma unroll
        for (int g = 0; g < GR; g++)
        {
            x[g] = 0;
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[g] += k[j] * s.q[g][j];
        }
        float logit = x[0];
        if (GR == 2)
            logit = (second ? x[GR - 1] : x[0]) + __shfl_xor_sync(~0u, second ? x[0] : x[GR - 1], 1);
#pragma unroll
        for (int o = GR; o < LANES; o *= 2)
            logit += __shfl_xor_sync(~0u, logit, o);
        float const kept = in ? logit : FAR, top = fmaxf(s.most, kept);
        if (__any_sync(~0u, top > s.most))
        {
            float const keep = exp2f(s.most - top), other = GR == 2 ? __shfl_xor_sync(~0u, keep, 1) : keep;
            s.total *= keep;
            s.most = top;
#pragma unroll
            for (int g = 0; g < GR; g++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    s.sums[g][j] *= second == (g == 1) ? keep : other;
        }
        float const p = in ? exp2f(logit - top) : 0.f, other = GR == 2 ? __shfl_xor_sync(~0u, p, 1) : p;
        s.total += p;
#pragma unroll
        for (int g = 0; g < GR; g++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                s.sums[g][j] += (second == (g == 1) ? p : other) * v[j];
        if (WINDOW)
        {
            float const w = near ? logit : FAR, reach = fmaxf(s.window_most, w);
            s.window_total = s.window_total * exp2f(s.window_most - reach) + (near ? exp2f(w - reach) : 0.f);
            s.window_most = reach;
        }
    }
}

extern __shared__ __align__(128) unsigned char memory[];
static_assert(sizeof(Shared) <= SHARED_BYTES, "cuda_decode.py counts less");

// Which heads a block works for, and where its row's states begin; of S and z and of the cache, the heads' own.
struct Row {
    int rank, b, head0, i_kv, i_select;
    u16 *window_key, *window_value, *salient_key, *salient_value;
    float *window_score, *z, *kv;

    __device__ __forceinline__ Row(PARAMETERS)
    {
        rank = CL > 1 ? blockIdx.x % CL : 0, b = blockIdx.y;
        head0 = blockIdx.x / CL * GR, i_kv = head0 / G, i_select = SCOPE ? i_kv : head0;
        size_t const cache = ((size_t)b * (SCOPE ? HK : H) + i_select) * N * D, head = (size_t)b * H + head0;
        window_key = p_window_key + (size_t)b * HK * (2 * C) * D, window_value = p_window_value + (size_t)b * HK * (2 * C) * D;
        window_score = p_window_score + (size_t)b * H * (2 * C);
        z = p_z_state + head * (2 * P), kv = p_kv_state + head * (2 * P * D);
        salient_key = p_salient_key + cache, salient_value = p_salient_value + cache;
    }
    __device__ __forceinline__ u16* ring_key() const { return window_key + (size_t)i_kv * (2 * C) * D; }
    __device__ __forceinline__ u16* ring_value() const { return window_value + (size_t)i_kv * (2 * C) * D; }
    __device__ __forceinline__ float* sums(int g) const { return kv + (size_t)g * (2 * P * D); }
};

struct Linear {
    float sums[GR][4], mass[GR];
};

// phi(q)^T S and phi(q) z from a block's stages, the first of which is stage n of the ring. FOLD: the promoted chunk is added to S and z.
template <bool FOLD>
__device__ __forceinline__ void sums(Linear& linear, Row const& here, int n, int old)
{
    Shared& s = *(Shared*)memory;
    int const rank = here.rank;
    constexpr int WIDE = D / 4, TALL = 32 / WIDE; // lanes of a row of S, rows that a warp takes at a time
    constexpr int TILES = D / 8 / WARPS;          // of columns, a warp's
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < GR; g++)
    {
        linear.mass[g] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            linear.sums[g][j] = 0;
    }
    u32 v[C / 16][TILES][2];
    if (FOLD)
    {
        u16 const* values = here.ring_value() + (old & 1) * C * D;
#pragma unroll
        for (int k = 0; k < C / 16; k++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                {
                    u16 const* at = values + (k * 16 + j * 8 + lane % 4 * 2) * D + (warp * TILES + t) * 8 + lane / 4;
                    v[k][t][j] = at[0] | (u32)at[D] << 16;
                }
        if (CL > 1 && rank < SSTAGES)
            peers_wait(&s.features, 0);
        else
            meet();
    }
#pragma unroll 1
    for (int i = 0; i < MINE; i++, n++)
    {
        int const u = i * CL + rank;
        if (u >= SSTAGES)
            break;
        int const f = u % FSTAGES * FEATS, g = u / FSTAGES;
        float* stage = (float*)s.ring[n % NST];
        bool const weigh = i % WARPS == warp && lane < 2 * FEATS;
        int const at_z = lane / FEATS * P + f + lane % FEATS;
        barrier_wait(&s.full[n % NST], (n / NST) & 1);
        if (FOLD)
        {
#pragma unroll
            for (int half = 0; half < 2 * FEATS / 16; half++)
            {
                float c[TILES][4] = {};
#pragma unroll
                for (int k = 0; k < C / 16; k++)
                {
                    u32 const* row = (u32 const*)&s.phi_k[i][half * 16 + lane / 4][k * 16] + lane % 4;
                    u32 const a[4] = {row[0], row[8 * (KEYS / 2)], row[4], row[8 * (KEYS / 2) + 4]};
#pragma unroll
                    for (int t = 0; t < TILES; t++)
                        multiply(c[t], a, v[k][t][0], v[k][t][1]);
                }
#pragma unroll
                for (int t = 0; t < TILES; t++)
                {
                    float2* at = (float2*)(stage + (half * 16 + lane / 4) * D + (warp * TILES + t) * 8 + lane % 4 * 2);
                    float2* below = at + 8 * (D / 2);
                    *at = make_float2(at->x + c[t][0], at->y + c[t][1]);
                    *below = make_float2(below->x + c[t][2], below->y + c[t][3]);
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // before the next copy into this stage
            meet();
        }
#pragma unroll
        for (int r = 0; r < 2 * FEATS / WARPS / TALL; r++)
        {
            int const row = (r * WARPS + warp) * TALL + lane / WIDE;
            float4 x = *(float4 const*)(stage + row * D + lane % WIDE * 4);
            if (FOLD)
                *(float4*)(here.sums(g) + (row / FEATS * P + f + row % FEATS) * D + lane % WIDE * 4) = x;
#pragma unroll
            for (int h = 0; h < GR; h++)
            {
                float const w = h == g ? s.phi[h][row / FEATS * P + f + row % FEATS] : 0.f;
                linear.sums[h][0] += w * x.x;
                linear.sums[h][1] += w * x.y;
                linear.sums[h][2] += w * x.z;
                linear.sums[h][3] += w * x.w;
            }
        }
        if (weigh)
        {
            float mine = stage[STAGE / 4 + lane];
            if (FOLD)
            {
                u32 const* row = (u32 const*)s.phi_k[i][lane];
#pragma unroll 8
                for (int k = 0; k < C / 2; k++)
                {
                    float2 const x = two(row[k]);
                    mine += x.x + x.y;
                }
                here.z[g * (2 * P) + at_z] = mine;
            }
#pragma unroll
            for (int h = 0; h < GR; h++)
                linear.mass[h] += h == g ? mine * s.phi[h][at_z] : 0.f;
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s.empty[n % NST]);
    }
    if (TALL == 2)
    {
#pragma unroll
        for (int g = 0; g < GR; g++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                linear.sums[g][j] += __shfl_xor_sync(~0u, linear.sums[g][j], 16);
    }
}

// The K tokens of the chunk with the highest scores, of equal ones the earlier; their rows go to the cache.
__device__ __forceinline__ void choose(Row const& here, int old, int G, int K, int N)
{
    Shared& s = *(Shared*)memory;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = threadIdx.x;
    float score = 0;
    if (mine < C)
    {
        float const* scores = here.window_score + (old & 1) * C + mine;
        if (SCOPE == 0)
            score = scores[here.head0 * (2 * C)];
        else
        {
            if (SCOPE == 1)
                score = __uint_as_float(0xff800000u);
            for (int g = 0; g < G; g++)
            {
                float const x = scores[(here.i_kv * G + g) * (2 * C)];
                score = SCOPE == 1 ? fmaxf(score, x) : score + x;
            }
            if (SCOPE == 2)
                score /= G;
        }
        s.scores[mine] = score;
    }
    meet();
    if (mine < C)
    {
        int ahead = 0;
#pragma unroll 16
        for (int i = 0; i < C; i++)
            ahead += s.scores[i] > score || (s.scores[i] == score && i < mine);
        u32 const chosen = __ballot_sync(~0u, ahead < K);
        if (lane == 0)
            s.selected[warp] = chosen;
    }
    meet();
    if (mine < C && (s.selected[warp] >> lane & 1))
        s.tokens[(warp ? __popc(s.selected[0]) : 0) + __popc(s.selected[warp] & ((1u << lane) - 1))] = mine;
    meet();
    if (here.rank == 0 && here.head0 == (SCOPE ? here.i_kv * G : here.head0) && lane < 2 * LANES)
        for (int turn = warp; turn < K; turn += WARPS)
        {
            int const slot = old * K + turn, from = ((old & 1) * C + s.tokens[turn]) * D;
            bool const value = lane >= LANES;
            if (slot < N)
                ((uint4*)((value ? here.salient_value : here.salient_key) + (size_t)slot * D))[lane % LANES] =
                    ((uint4 const*)((value ? here.ring_value() : here.ring_key()) + from))[lane % LANES];
        }
}

// Features of the chunk's keys: a block makes those of some keys, and sends each block its rows.
__device__ __forceinline__ void key_features(Row const& here, int old, u16 const* p_feature_k_weight, int W_HEADS)
{
    Shared& s = *(Shared*)memory;
    int const rank = here.rank;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int g = 0; g < GR; g++)
    {
        u16 const* weight = p_feature_k_weight + (size_t)(W_HEADS > 1 ? here.head0 + g : 0) * (P * D);
        u32 const* rows = (u32 const*)(weight + (warp * 16 + lane / 4) * D) + lane % 4;
        for (int t = rank; t < C / 8; t += CL)
        {
            u16 const* keys = here.ring_key() + ((old & 1) * C + t * 8) * D;
            if (warp < P / 16)
            {
                float c[4] = {};
                u32 const* column = (u32 const*)(keys + lane / 4 * D) + lane % 4;
#pragma unroll
                for (int k = 0; k < D / 16; k++)
                {
                    u32 const a[4] = {__ldg(rows + k * 8), __ldg(rows + 8 * (D / 2) + k * 8), __ldg(rows + k * 8 + 4),
                                      __ldg(rows + 8 * (D / 2) + k * 8 + 4)};
                    multiply(c, a, column[k * 8], column[k * 8 + 4]);
                }
                int const f = warp * 16 + lane / 4, key = lane % 4 * 2;
                s.key_direction[key][f] = c[0];
                s.key_direction[key + 1][f] = c[1];
                s.key_direction[key][f + 8] = c[2];
                s.key_direction[key + 1][f + 8] = c[3];
            }
            meet();
            {
                float plus[P / 32], minus[P / 32];
                features_of(s.key_direction[warp], keys + warp * D, lane, plus, minus);
                bool const folded = !(s.selected[t / 4] >> (t % 4 * 8 + warp) & 1);
#pragma unroll
                for (int i = 0; i < P / 32; i++)
                {
                    s.tile[i * 32 + lane][warp] = folded ? half_of(plus[i]) : 0;
                    s.tile[P + i * 32 + lane][warp] = folded ? half_of(minus[i]) : 0;
                }
            }
            meet();
            for (int f = threadIdx.x; f < 2 * P; f += THREADS)
            {
                int const u = g * FSTAGES + f % P / FEATS, to = u % CL;
                u16* row = &s.phi_k[u / CL][f / P * FEATS + f % FEATS][t * 8];
                uint4 const x = *(uint4 const*)s.tile[f];
                if (CL > 1)
                    put4(at_rank(row, to), x, at_rank(&s.features, to));
                else
                    *(uint4*)row = x;
            }
        }
    }
}

// The last head writes the token to the ring, and the scores, once nobody reads what they take the place of.
__device__ __forceinline__ void commit(Row const& here, int slot, u16 const* key, u16 const* value, float const* score, int* counter,
                                       int H, int HK)
{
    Shared& s = *(Shared*)memory;
    meet();
    if (threadIdx.x == 0)
    {
        __threadfence();
        s.last = atomicAdd(counter, 1) == H / GR - 1;
        __threadfence();
    }
    meet();
    if (!s.last)
        return;
    if (threadIdx.x == 0)
        *counter = 0;
    for (int i = threadIdx.x; i < HK * D; i += THREADS)
    {
        int const to = (i / D * (2 * C) + slot) * D + i % D;
        here.window_key[to] = key[i];
        here.window_value[to] = value[i];
    }
    for (int i = threadIdx.x; i < H; i += THREADS)
        here.window_score[i * (2 * C) + slot] = __ldcg(score + i);
}

// What follows once the length is known. PROMOTING: a chunk leaves the window in this step.
template <bool PROMOTING>
__device__ __forceinline__ void step(PARAMETERS)
{
    Shared& s = *(Shared*)memory;
    Row const here(ARGUMENTS);
    int const rank = here.rank, b = here.b, head0 = here.head0, i_kv = here.i_kv, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const part = lane % LANES;
    Count const past = p_past_length[b];
    int const length = min(max((long long)past, 0ll), 1ll << 30), chunk = length / C, low = (chunk - 1) * C, old = chunk - 2;
    bool const live = PROMOTING || p_new_tokens[b] > 0;
    int const seen = live ? min(max(chunk - 1 - (int)PROMOTING, 0) * K, N) : 0;
    u16 const* query = p_query + ((size_t)here.b * H + head0) * D;
    Softmax softmax;
#pragma unroll
    for (int g = 0; g < GR; g++)
    {
        eight(*(uint4 const*)(query + g * D + part * 8), softmax.q[g]);
#pragma unroll
        for (int j = 0; j < 8; j++)
        {
            softmax.q[g][j] *= scale * LOG2E;
            softmax.sums[g][j] = 0;
        }
    }
    softmax.most = softmax.window_most = FAR;
    softmax.total = softmax.window_total = 0;
    if (rank == 0 && warp == 0)
    {
        float k[8];
        eight(*(uint4 const*)(p_key + ((size_t)here.b * HK + i_kv) * D + part * 8), k);
#pragma unroll
        for (int g = 0; g < GR; g++)
        {
            float x = 0;
#pragma unroll
            for (int j = 0; j < 8; j++)
                x += k[j] * softmax.q[g][j];
#pragma unroll
            for (int o = LANES / 2; o; o /= 2)
                x += __shfl_xor_sync(~0u, x, o);
            if (lane == 0)
                s.own[g] = x;
        }
    }
    if (PROMOTING)
        choose(here, old, G, K, N);
    int n = 0;
    for (int i = rank; i < WSTAGES; i += CL, n++)
    {
        barrier_wait(&s.full[n % NST], (n / NST) & 1);
        absorb<true>(softmax, s.ring[n % NST], WSLOTS, i * WSLOTS, length, low, PROMOTING, s.selected, warp, lane);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s.empty[n % NST]);
    }
    if (CL > 1)
        peers_wait(&s.directions, 0);
    else
        meet();
    if (warp < GR)
    {
        float plus[P / 32], minus[P / 32];
        features_of(s.direction[warp], query + warp * D, lane, plus, minus);
#pragma unroll
        for (int i = 0; i < P / 32; i++)
        {
            s.phi[warp][i * 32 + lane] = plus[i];
            s.phi[warp][P + i * 32 + lane] = minus[i];
        }
    }
    meet();
    if (PROMOTING)
        key_features(here, old, p_feature_k_weight, W_HEADS);
    Linear linear;
    if (!PROMOTING)
    {
        sums<false>(linear, here, n, old);
        n += SSTAGES > here.rank ? (SSTAGES - here.rank + CL - 1) / CL : 0;
    }
    for (int i = rank; i * SLOTS < seen; i += CL, n++)
    {
        barrier_wait(&s.full[n % NST], (n / NST) & 1);
        absorb<false>(softmax, s.ring[n % NST], SLOTS, i * SLOTS, seen, 0, false, s.selected, warp, lane);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s.empty[n % NST]);
    }
    if (PROMOTING)
        sums<true>(linear, here, n, old);
    // The rows of a warp, the warps of a block, the blocks.
#pragma unroll
    for (int o = LANES; o < 32; o *= 2)
    {
        float const top = fmaxf(softmax.most, __shfl_xor_sync(~0u, softmax.most, o)), keep = exp2f(softmax.most - top);
        float const reach = fmaxf(softmax.window_most, __shfl_xor_sync(~0u, softmax.window_most, o));
        float const other = GR == 2 ? __shfl_xor_sync(~0u, keep, 1) : keep;
        softmax.most = top;
        softmax.total *= keep;
        softmax.total += __shfl_xor_sync(~0u, softmax.total, o);
#pragma unroll
        for (int g = 0; g < GR; g++)
#pragma unroll
            for (int j = 0; j < 8; j++)
            {
                softmax.sums[g][j] *= (GR == 2 && (lane & 1)) == (g == 1) ? keep : other;
                softmax.sums[g][j] += __shfl_xor_sync(~0u, softmax.sums[g][j], o);
            }
        softmax.window_total *= exp2f(softmax.window_most - reach);
        softmax.window_total += __shfl_xor_sync(~0u, softmax.window_total, o);
        softmax.window_most = reach;
    }
#pragma unroll
    for (int g = 0; g < GR; g++)
    {
        linear.mass[g] = sum_of_warp(linear.mass[g]);
        if (lane < LANES)
        {
            float const* x = softmax.sums[g];
            *(float4*)&s.warp_sums[warp][g][part * 8] = make_float4(x[0], x[1], x[2], x[3]);
            *(float4*)&s.warp_sums[warp][g][part * 8 + 4] = make_float4(x[4], x[5], x[6], x[7]);
        }
        if (lane * 4 < D)
        {
            float const* x = linear.sums[g];
            *(float4*)&s.warp_linear[warp][g][lane * 4] = make_float4(x[0], x[1], x[2], x[3]);
        }
        if (lane == g)
        {
            float* few = s.warp_few[warp][g];
            few[0] = softmax.most, few[1] = softmax.total, few[2] = linear.mass[g];
            few[3] = softmax.window_most, few[4] = softmax.window_total;
        }
    }
    meet();
    for (int x = threadIdx.x; x < GR * D; x += THREADS)
    {
        int const g = x / D, d = x % D;
        float few[5] = {FAR, 0, 0, FAR, 0}, found = 0, summed = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
        {
            few[0] = fmaxf(few[0], s.warp_few[w][g][0]);
            few[3] = fmaxf(few[3], s.warp_few[w][g][3]);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++)
        {
            float const keep = exp2f(s.warp_few[w][g][0] - few[0]);
            found += s.warp_sums[w][g][d] * keep;
            summed += s.warp_linear[w][g][d];
            few[1] += s.warp_few[w][g][1] * keep;
            few[2] += s.warp_few[w][g][2];
            few[4] += s.warp_few[w][g][4] * exp2f(s.warp_few[w][g][3] - few[3]);
        }
        if (CL > 1)
        {
            u32 const parts = at_rank(&s.parts, 0);
            put(at_rank(&s.sums[rank][g][d], 0), found, parts);
            put(at_rank(&s.linear[rank][g][d], 0), summed, parts);
            if (d == 0)
                for (int i = 0; i < 5; i++)
                    put(at_rank(&s.few[rank][g][i], 0), few[i], parts);
        }
        else
        {
            s.sums[0][g][d] = found;
            s.linear[0][g][d] = summed;
            if (d == 0)
                for (int i = 0; i < 5; i++)
                    s.few[0][g][i] = few[i];
        }
    }
    if (rank != 0)
        return;
    constexpr int TURNS = (GR * D + THREADS - 1) / THREADS;
    float gates[TURNS], values[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; i++)
    {
        int const x = i * THREADS + threadIdx.x;
        if (x < GR * D)
        {
            gates[i] = p_gate ? one(p_gate[((size_t)here.b * H + head0) * D + x]) : 1.f;
            values[i] = one(p_value[((size_t)here.b * HK + i_kv) * D + x % D]);
        }
    }
    if (CL > 1)
        peers_wait(&s.parts, 0);
    else
        meet();
    int const slot = length & (2 * C - 1);
#pragma unroll
    for (int i = 0; i < TURNS; i++)
    {
        int const x = i * THREADS + threadIdx.x, g = x / D, d = x % D;
        if (x >= GR * D)
            break;
        float const own = s.own[g];
        float top = own, total = 0, found = 0, summed = 0, den = 0;
#pragma unroll
        for (int r = 0; r < CL; r++)
            top = fmaxf(top, s.few[r][g][0]);
        if (phantom && chunk == 0)
            top = fmaxf(top, 0.f);
#pragma unroll
        for (int r = 0; r < CL; r++)
        {
            float const keep = exp2f(s.few[r][g][0] - top);
            found += s.sums[r][g][d] * keep;
            total += s.few[r][g][1] * keep;
            summed += s.linear[r][g][d];
            den += s.few[r][g][2];
        }
        float const p = exp2f(own - top);
        found += p * values[i];
        total += p;
        if (phantom && chunk == 0)
            total += C * exp2f(-top);
        if (p_window_factor)
        {
            float const factor = p_window_factor[head0 + g];
            found *= factor;
            total *= factor;
        }
        float out = (found + gates[i] * summed) / (total + den + epsilon);
        if (max(chunk - 1, 0) * K > N) // beyond the capacity: the caller should have refused
            out = __uint_as_float(0x7fc00000u);
        p_output[((size_t)here.b * H + head0) * D + x] = half_of(live ? out : 0.f);
        if (live && d == 0)
        {
            float reach = FAR, others = 0;
#pragma unroll
            for (int r = 0; r < CL; r++)
                reach = fmaxf(reach, s.few[r][g][3]);
#pragma unroll
            for (int r = 0; r < CL; r++)
                others += s.few[r][g][4] * exp2f(s.few[r][g][3] - reach);
            float const score = length == 0 ? __uint_as_float(0x7f800000u) : (own - reach - log2f(others)) / LOG2E;
            if (PROMOTING) // other heads may still select by the score that this one replaces
                p_part_den[b * H + head0 + g] = score;
            else
                here.window_score[(head0 + g) * (2 * C) + slot] = score;
        }
        if (live && !PROMOTING && g == 0 && head0 % G == 0)
        {
            here.ring_key()[slot * D + d] = p_key[((size_t)here.b * HK + i_kv) * D + d];
            here.ring_value()[slot * D + d] = p_value[((size_t)here.b * HK + i_kv) * D + d];
        }
    }
    if (p_present_length && head0 == 0 && threadIdx.x == 0)
        p_present_length[b] = past + (Count)live;
    if (PROMOTING)
    {
        size_t const token = (size_t)here.b * HK * D;
        commit(here, slot, p_key + token, p_value + token, p_part_den + b * H, p_counters + b * (2 * H) + H, H, HK);
    }
}

// A function of its own takes no registers of the other steps.
__device__ __noinline__ void promoting_step(PARAMETERS) { step<true>(ARGUMENTS); }
}

extern "C" __global__ void __cluster_dims__(CL, 1, 1) __launch_bounds__(THREADS + 32, MINB) decode_cluster_kernel(PARAMETERS)
{
    Shared& s = *(Shared*)memory;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Row const here(ARGUMENTS);
    int const rank = here.rank, b = here.b, head0 = here.head0;
    if (threadIdx.x == 0)
    {
        for (int i = 0; i < NST; i++)
        {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], WARPS);
        }
        barrier_init(&s.directions, 1);
        barrier_init(&s.features, 1);
        barrier_init(&s.parts, 1);
        if (CL > 1)
        {
            int const stages = (SSTAGES - rank + CL - 1) / CL;
            barrier_expect(&s.directions, GR * P * 4);
            if (stages > 0)
                barrier_expect(&s.features, stages * 2 * FEATS * C * 2);
            barrier_expect(&s.parts, CL * GR * (2 * D + 5) * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == WARPS && lane == 0)
    {
        for (int i = rank; i < SSTAGES; i += CL) // to L2 while the kernel ahead still runs; what is read here counts only later
        {
            float const* rows = here.sums(i / FSTAGES) + i % FSTAGES * FEATS * D;
            ahead(rows, STAGE / 2);
            ahead(rows + P * D, STAGE / 2);
        }
    }
    __syncthreads();
    if (CL > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (warp == WARPS)
    {
        if (lane == 0)
        {
            u64 once, again;
            asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
            asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(again));
            int n = 0;
            auto begin = [&](int bytes) {
                int const i = n % NST;
                if (n >= NST)
                    barrier_wait(&s.empty[i], (n / NST - 1) & 1);
                n++;
                barrier_expect(&s.full[i], bytes);
                return i;
            };
            auto sums = [&]() {
                for (int i = rank; i < SSTAGES; i += CL)
                {
                    float const* rows = here.sums(i / FSTAGES) + i % FSTAGES * FEATS * D;
                    float const* masses = here.z + i / FSTAGES * (2 * P) + i % FSTAGES * FEATS;
                    int const at = begin(STAGE + 2 * FEATS * 4);
                    copy(s.ring[at], rows, STAGE / 2, &s.full[at], once);
                    copy(s.ring[at] + STAGE / 2, rows + P * D, STAGE / 2, &s.full[at], once);
                    copy(s.ring[at] + STAGE, masses, FEATS * 4, &s.full[at], once);
                    copy(s.ring[at] + STAGE + FEATS * 4, masses + P, FEATS * 4, &s.full[at], once);
                }
            };
            for (int i = rank; i < WSTAGES; i += CL)
            {
                constexpr int BYTES = WSLOTS * 2 * D;
                int const at = begin(2 * BYTES);
                copy(s.ring[at], here.ring_key() + i * WSLOTS * D, BYTES, &s.full[at], again);
                copy(s.ring[at] + BYTES, here.ring_value() + i * WSLOTS * D, BYTES, &s.full[at], again);
            }
            int const length = min(max((long long)p_past_length[b], 0ll), 1ll << 30);
            bool const live = p_new_tokens[b] > 0;
            bool const promoting = live && length % C == 0 && length >= 2 * C;
            int const seen = live ? min(max(length / C - 1 - (int)promoting, 0) * K, N) : 0;
            if (promoting)
            {
                // What the workers will ask for while the cache is copied.
                size_t const half = (size_t)(length / C & 1) * C * D;
                for (int g = 0; g < (W_HEADS > 1 ? GR : 1); g++)
                    ahead(p_feature_k_weight + (size_t)(W_HEADS > 1 ? head0 + g : 0) * (P * D), P * D * 2);
                ahead(here.ring_key() + half, C * D * 2);
                ahead(here.ring_value() + half, C * D * 2);
            }
            else
                sums();
            for (int i = rank; i * SLOTS < seen; i += CL)
            {
                int const bytes = min(SLOTS, N - i * SLOTS) * 2 * D, at = begin(2 * bytes);
                copy(s.ring[at], here.salient_key + (size_t)i * SLOTS * D, bytes, &s.full[at], once);
                copy(s.ring[at] + SLOTS * 2 * D, here.salient_value + (size_t)i * SLOTS * D, bytes, &s.full[at], once);
            }
            if (promoting)
                sums(); // by then the chunk's features are there
        }
        return;
    }
    int const length = min(max((long long)p_past_length[b], 0ll), 1ll << 30);
    bool const promoting = p_new_tokens[b] > 0 && length % C == 0 && length >= 2 * C;
    u16 const* query = p_query + ((size_t)here.b * H + head0) * D;
    {
        // Directions of the queries: each block has some rows of the projections, all get all.
        constexpr int EACH = GR * P / CL / WARPS;
        static_assert(EACH >= 1, "");
        float value[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
        {
            int const row = (rank * WARPS + warp) * EACH + i, g = row / P;
            u16 const* weight = p_feature_q_weight + (size_t)(W_HEADS > 1 ? head0 + g : 0) * (P * D) + row % P * D;
            value[i] = 0;
#pragma unroll
            for (int j = 0; j < D / 64; j++)
            {
                float2 const w = two(__ldg((u32 const*)weight + j * 32 + lane)), x = two(((u32 const*)(query + g * D))[j * 32 + lane]);
                value[i] += w.x * x.x + w.y * x.y;
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
            value[i] = sum_of_warp(value[i]);
        if (CL > 1)
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); // all blocks run
        if (lane < CL)
        {
#pragma unroll
            for (int i = 0; i < EACH; i++)
            {
                float* to = &s.direction[0][0] + (rank * WARPS + warp) * EACH + i;
                if (CL > 1)
                    put(at_rank(to, lane), value[i], at_rank(&s.directions, lane));
                else
                    *to = value[i];
            }
        }
    }
    if (promoting)
        promoting_step(ARGUMENTS);
    else
        step<false>(ARGUMENTS);
}
