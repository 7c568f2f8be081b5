// The tasks of the causal convolution. Compiled once per instruction set; STILL_KERNELS names the table.
#include "causal_conv.h"

#include "cpu/common/elements.h"
#include "cpu/common/simd.h"

namespace
{

using namespace still_cpu::convolution;

template <typename T>
void run(Task const& task)
{
    Layer const& l = *task.layer;
    Tensors const& x = *task.tensors;
    int const taps = l.taps, past = taps - 1, width = l.channels - task.channel < kBlock ? l.channels - task.channel : kBlock;
    if (task.count == 0)
        return;
    Room room{task.room};
    float *const weight = room.take(static_cast<int64_t>(taps) * kBlock), *const bias = room.take(kBlock);
    float* const known = room.take(static_cast<int64_t>(past + kTileTokens) * kBlock); // [past and new tokens, channels]
    float* const sums = room.take(kBlock);
    if (width < kBlock) // channels after the last one; half of a step's time
        std::memset(task.room, 0, sizeof(float) * still_cpu::convolution::room(l));
    if (!x.bias)
        std::memset(bias, 0, sizeof(float) * kBlock);
    T* const state = at<T>(x.state, (static_cast<int64_t>(task.row) * l.channels + task.channel) * past);
    for (int c = 0; c < width; ++c)
    {
        for (int k = 0; k < taps; ++k)
            weight[k * kBlock + c] = to_float(at<T>(x.weight, static_cast<int64_t>(task.channel + c) * taps)[k]);
        for (int k = 0; k < past; ++k)
            known[k * kBlock + c] = to_float(state[c * past + k]);
        if (x.bias)
            bias[c] = to_float(at<T>(x.bias, task.channel)[c]);
    }
    for (int64_t token = 0; token < task.count; token += kTileTokens)
    {
        int const count = static_cast<int>(task.count - token < kTileTokens ? task.count - token : kTileTokens);
        for (int t = 0; t < count; ++t)
        {
            int64_t const place = ((static_cast<int64_t>(task.row) * x.tokens + token + t) * l.channels + task.channel);
            T const* const from = at<T>(x.input, place);
            T* const to = at<T>(x.output, place);
            for (int c = 0; c < width; ++c)
                known[(past + t) * kBlock + c] = to_float(from[c]);
            for (int c = 0; c < width; c += kLanes)
            {
                Vec total = load(bias + c);
                for (int k = 0; k < taps; ++k)
                    total += load(weight + k * kBlock + c) * load(known + (t + k) * kBlock + c);
                store(sums + c, l.silu ? total / (1 + exponential(-total)) : total);
            }
            for (int c = 0; c < width; ++c)
                from_float(sums[c], to + c);
        }
        std::memmove(known, known + count * kBlock, sizeof(float) * static_cast<unsigned>(past * kBlock));
    }
    for (int c = 0; c < width; ++c)
        for (int k = 0; k < past; ++k)
            from_float(known[k * kBlock + c], state + c * past + k);
}

template <typename T>
constexpr Kernels kTable{run<T>};

} // namespace

still_cpu::convolution::Kernels const& still_cpu::convolution::STILL_KERNELS(Numbers kind)
{
    return kind == Numbers::kHalf ? kTable<Half> : kTable<float>;
}
