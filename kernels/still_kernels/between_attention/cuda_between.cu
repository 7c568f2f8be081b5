// One token from a layer's attention to the next one's, on a grid whose blocks have 16 outputs of one GEMM each. They copy their weights to
// shared memory at once, so that memory is busy from the first moment on, and then wait for the numbers that they multiply.
//
// Numbers between the GEMMs go from block to block as words of 32 bits: the number, and above it 1, which says that it is there. Who reads
// one asks again until it is: no barrier, no fence. A block waits only for blocks of smaller numbers, which a GPU starts earlier, so that
// it may hold any number of them at a time. Words are zero before a launch and after it: blocks of the last GEMM find all words of the
// third there, so that nobody reads those before any more, and the last of them clears the third's.
//
// cuda_between.py has the arguments and the macros: sizes, multiples of 16; T16 is 0 for float16, 1 for bfloat16.

typedef unsigned int u32;
typedef unsigned short u16;

namespace {
constexpr int WARPS = THREADS / 32;
constexpr int FRONT = WIDTH / 16, GATED = MIDDLE / 16, NEXT = (OUTPUTS + GATE) / 16; // blocks of a GEMM
constexpr int MOST = MIDDLE > WIDTH ? (MIDDLE > ATTENDED ? MIDDLE : ATTENDED) : (WIDTH > ATTENDED ? WIDTH : ATTENDED);
constexpr int WEIGHTS = SHARED_BYTES / 2 - MOST - 2 * (17 * WARPS + 4);
static_assert(WIDTH % 16 == 0 && ATTENDED % 16 == 0 && MIDDLE % 16 == 0 && OUTPUTS % 16 == 0 && GATE % 16 == 0, "");
static_assert(WIDTH <= 4 * THREADS && WARPS % 2 == 0, "");

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
__device__ __forceinline__ void put(u32* word, u16 x)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x | 0x10000u) : "memory");
}
__device__ __forceinline__ uint4 four(u32 const* words) // when they are there
{
    uint4 x;
    do
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(words) : "memory");
    while ((x.x & x.y & x.z & x.w) >> 16 == 0);
    return x;
}
// 16 columns of K rows of a weight, as [2][K][8].
template <int K> __device__ __forceinline__ void fetch(u16* to, u16 const* from, int columns)
{
    u32 const place = (u32)__cvta_generic_to_shared(to);
    for (int i = threadIdx.x; i < 2 * K; i += THREADS)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(place + ((i & 1) * K + (i >> 1)) * 16),
                     "l"(from + (long long)(i >> 1) * columns + (i & 1) * 8));
}
// Sums of 16 outputs over the inputs of one of TURNS warps, which have 16 of K in turn: x [K] times [2][K][8].
template <int K, int TURNS> __device__ __forceinline__ void multiply(u16 const* weight, u16 const* x, int turn, float* sums)
{
    int const lane = threadIdx.x % 32, t = lane % 4;
    float c[2][2][4] = {};
    u32 const from = (u32)__cvta_generic_to_shared(weight) + ((lane / 16) * K + lane % 16) * 16;
#pragma unroll
    for (int round = 0; round < (K / 16 + TURNS - 1) / TURNS; ++round)
    {
        int const k = 16 * (round * TURNS + turn);
        if (K / 16 % TURNS != 0 && k >= K)
            break;
        u32 b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(from + k * 16)
                     : "memory");
        u32 const a0 = *(u32 const*)(x + k + 2 * t), a2 = *(u32 const*)(x + k + 8 + 2 * t); // every row is the token
#pragma unroll
        for (int n = 0; n < 2; ++n)
        {
            float* d = c[n][round % 2];
#if T16
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %5, %5}, {%6, %7}, {%0, %1, %2, %3};"
#else
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %5, %5}, {%6, %7}, {%0, %1, %2, %3};"
#endif
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a0), "r"(a2), "r"(b[2 * n]), "r"(b[2 * n + 1]));
        }
    }
    if (lane < 4)
        for (int n = 0; n < 2; ++n)
            for (int j = 0; j < 2; ++j)
                sums[8 * n + 2 * t + j] = c[n][0][j] + c[n][1][j];
}
// Of the sums of all or of every second warp those of one output.
__device__ __forceinline__ float total(float const* sums, int first, int stride)
{
    float x = 0;
#pragma unroll
    for (int warp = first; warp < WARPS; warp += stride)
        x += sums[16 * warp];
    return x;
}
// x [WIDTH]: the norm of a token's words.
__device__ __forceinline__ void norm(u32 const* words, u16 const* weight, float epsilon, u16* x, float* squares)
{
    int const at = 4 * threadIdx.x;
    float y[4] = {}, w[4] = {}, square = 0;
    if (at < WIDTH)
    {
        for (int j = 0; j < 4; ++j)
            w[j] = one(weight[at + j]);
        uint4 const found = four(words + at);
        y[0] = one((u16)found.x), y[1] = one((u16)found.y), y[2] = one((u16)found.z), y[3] = one((u16)found.w);
        square = y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3];
    }
    for (int lanes = 16; lanes; lanes /= 2)
        square += __shfl_xor_sync(~0u, square, lanes);
    if (threadIdx.x % 32 == 0)
        squares[threadIdx.x / 32] = square;
    __syncthreads();
    square = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
        square += squares[warp];
    float const scale = 1 / sqrtf(square / WIDTH + epsilon);
    if (at < WIDTH)
        for (int j = 0; j < 4; ++j)
            x[at + j] = half_of(y[j] * scale * w[j]);
}
__device__ __forceinline__ void arrived() // of copies, and of what other threads wrote
{
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}
} // namespace

extern "C" __global__ void __launch_bounds__(THREADS) between_kernel(PARAMETERS)
{
    extern __shared__ __align__(16) u16 weights[]; // of this block
    u16* const x = weights + WEIGHTS;
    float *const sums = (float*)(x + MOST), *const squares = sums + 16 * WARPS;
    int& last = *(int*)(squares + WARPS);
    u32 *const attended = (u32*)p_words, *const middle = attended + WIDTH, *const layer = middle + MIDDLE, *const arrivals = layer + WIDTH;
    int const thread = threadIdx.x, warp = thread / 32;
    int block = blockIdx.x;
    if (block < FRONT) // attention
    {
        int const output = 16 * block + thread;
        fetch<ATTENDED>(weights, p_output_weight + 16 * block, WIDTH);
        float const residual = thread < 16 ? one(p_residual[output]) : 0;
        for (int i = thread; i < ATTENDED / 2; i += THREADS)
            ((u32*)x)[i] = ((u32 const*)p_attention)[i];
        arrived();
        multiply<ATTENDED, WARPS>(weights, x, warp, sums + 16 * warp);
        __syncthreads();
        if (thread < 16)
            put(attended + output, half_of(residual + total(sums + thread, 0, 1)));
        return;
    }
    if ((block -= FRONT) < GATED) // gate and up, in turn for even and for odd warps
    {
        fetch<WIDTH>(weights, p_gate_up + 16 * block, 2 * MIDDLE);
        fetch<WIDTH>(weights + 16 * WIDTH, p_gate_up + MIDDLE + 16 * block, 2 * MIDDLE);
        norm(attended, p_norm_weight, epsilon, x, squares);
        arrived();
        multiply<WIDTH, WARPS / 2>(weights + warp % 2 * 16 * WIDTH, x, warp / 2, sums + 16 * warp);
        __syncthreads();
        if (thread < 16)
        {
            float const gate = total(sums + thread, 0, 2), up = total(sums + thread, 1, 2);
            put(middle + 16 * block + thread, half_of(gate / (1 + __expf(-gate)) * up));
        }
        return;
    }
    if ((block -= GATED) < FRONT) // down
    {
        fetch<MIDDLE>(weights, p_down + 16 * block, WIDTH);
        for (int i = thread; i < MIDDLE / 4; i += THREADS)
        {
            uint4 const found = four(middle + 4 * i);
            *(uint2*)(x + 4 * i) = make_uint2((found.x & 0xffff) | found.y << 16, (found.z & 0xffff) | found.w << 16);
        }
        arrived();
        multiply<MIDDLE, WARPS>(weights, x, warp, sums + 16 * warp);
        __syncthreads();
        if (thread < 16)
        {
            int const output = 16 * block + thread;
            u32 word;
            do
                asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(attended + output) : "memory");
            while (word >> 16 == 0);
            u16 const found = half_of(one((u16)word) + total(sums + thread, 0, 1));
            put(layer + output, found);
            p_output[output] = found;
        }
        return;
    }
    block -= FRONT; // what the next layer's attention reads
    bool const gate = block >= OUTPUTS / 16;
    int const output = 16 * (gate ? block - OUTPUTS / 16 : block) + thread;
    fetch<WIDTH>(weights, (gate ? p_next_gate_weight : p_next_weight) + output - thread, gate ? GATE : OUTPUTS);
    norm(layer, p_next_norm_weight, epsilon, x, squares);
    arrived();
    if (thread == 0)
        last = atomicAdd(arrivals, 1) == NEXT - 1;
    multiply<WIDTH, WARPS>(weights, x, warp, sums + 16 * warp);
    for (int i = block * THREADS + thread; i < WIDTH + MIDDLE; i += NEXT * THREADS)
        attended[i] = 0;
    __syncthreads();
    if (thread < 16)
        (gate ? p_next_gate : p_next)[output] = half_of(total(sums + thread, 0, 1));
    if (last)
        for (int i = thread; i <= WIDTH; i += THREADS)
            layer[i] = 0;
}
