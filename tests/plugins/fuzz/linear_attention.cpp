// The CPU kernels of linear attention and of the causal convolution on calls that the schema lets pass, whatever numbers they hold;
// with harmless numbers a call in two pieces has to give what it gives at once.
#include "causal_conv/cpu/causal_conv.h"
#include "linear_attention/cpu/linear_attention.h"
#include "input.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

namespace
{

using namespace still_cpu;
using still_fuzz::Bytes;
using still_fuzz::floats;
using still_fuzz::tensor;

Bytes copy(Bytes const& from, int64_t count)
{
    Bytes bytes(new char[static_cast<size_t>(count) * 4]);
    std::memcpy(bytes.get(), from.get(), static_cast<size_t>(count) * 4);
    return bytes;
}

void demand_equal(float const* a, float const* b, int64_t count)
{
    for (int64_t i = 0; i < count; ++i)
        if (!(std::fabs(a[i] - b[i]) <= 1e-3f * (1 + std::fabs(b[i]))))
            std::abort();
}

void attend(still_fuzz::Input& input)
{
    linear::Layer l{};
    l.heads = static_cast<int>(input.between(1, 4));
    l.query_groups = input.one_in(2) ? 1 : l.heads;
    l.key_heads = input.one_in(2) ? 1 : l.heads;
    l.shared = static_cast<int>(input.between(1, 3));
    l.dim = static_cast<int>(input.between(1, 40));
    l.size = static_cast<int>(input.one_in(4) ? input.between(120, 140) : input.between(1, 40));
    l.decay = input.one_in(3) ? 0 : input.one_in(2) ? 1 : l.dim;
    l.betas = input.one_in(3) ? 0 : input.one_in(2) ? 1 : l.heads;
    l.scale = 1;
    l.half = input.one_in(3);
    int const batch = static_cast<int>(input.between(1, 2));
    int64_t const tokens = input.one_in(3) ? 1 : input.between(1, 100);
    std::vector<int64_t> brought;
    for (int row = 0; row < batch; ++row)
        brought.push_back(input.one_in(2) ? tokens : input.between(0, tokens));
    bool const wild = input.one_in(3), compared = !wild && !l.half && batch == 1 && brought[0] > 1;
    uint32_t const seed = input.raw<uint32_t>();
    int const element = l.half ? 2 : 4;
    int64_t const places = batch * tokens, outputs = places * l.heads * l.shared * l.size, states = batch * l.heads * l.dim * l.size;
    float const unit = 1 / std::sqrt(static_cast<float>(l.dim)); // keys no longer than 1, as the delta rules need
    Bytes const query = tensor(places * l.query_groups * l.shared * l.dim, element, seed, wild, -0.5f, 0.5f);
    Bytes const key = tensor(places * l.key_heads * l.dim, element, seed + 1, wild, -unit, unit);
    Bytes const value = tensor(places * l.heads * l.size, element, seed + 2, wild, -0.5f, 0.5f);
    Bytes const decay = tensor(places * l.heads * l.decay, 4, seed + 3, wild, -2, 0);
    Bytes const beta = tensor(places * l.betas, 4, seed + 4, wild, 0, 2);
    Bytes const output = tensor(outputs, element, seed + 5, true), state = tensor(states, 4, seed + 6, wild, -0.5f, 0.5f);
    Bytes const again = copy(state, states);
    still_fuzz::Backwards host(static_cast<int>(input.between(0, count_instruction_sets() - 1)));
    linear::Tensors x{query.get(), key.get(), value.get(), l.decay ? floats(decay) : nullptr, l.betas ? floats(beta) : nullptr, output.get(),
        floats(state), tokens};
    linear::attention(l, x, batch, brought.data(), host);
    if (!compared)
        return;
    int64_t const first = brought[0] / 2, rest = brought[0] - first;
    Bytes const pieces = tensor(outputs, 4, seed + 5, true);
    x.output = pieces.get(), x.state = floats(again), x.tokens = first;
    linear::attention(l, x, 1, &first, host);
    linear::Tensors const after{floats(query, first * l.query_groups * l.shared * l.dim), floats(key, first * l.key_heads * l.dim),
        floats(value, first * l.heads * l.size), l.decay ? floats(decay, first * l.heads * l.decay) : nullptr,
        l.betas ? floats(beta, first * l.betas) : nullptr, floats(pieces, first * l.heads * l.shared * l.size), floats(again), rest};
    linear::attention(l, after, 1, &rest, host);
    demand_equal(floats(pieces), floats(output), brought[0] * l.heads * l.shared * l.size);
    demand_equal(floats(again), floats(state), states);
}

void convolve(still_fuzz::Input& input)
{
    convolution::Layer l{};
    l.channels = static_cast<int>(input.between(1, 200));
    l.taps = static_cast<int>(input.between(2, 9));
    l.silu = input.one_in(2);
    l.half = input.one_in(3);
    int const batch = static_cast<int>(input.between(1, 2));
    int64_t const tokens = input.one_in(3) ? 1 : input.between(1, 150);
    std::vector<int64_t> brought;
    for (int row = 0; row < batch; ++row)
        brought.push_back(input.one_in(2) ? tokens : input.between(0, tokens));
    bool const wild = input.one_in(3);
    uint32_t const seed = input.raw<uint32_t>();
    int const element = l.half ? 2 : 4;
    Bytes const in = tensor(batch * tokens * l.channels, element, seed, wild);
    Bytes const weight = tensor(l.channels * l.taps, element, seed + 1, wild);
    Bytes const bias = tensor(l.channels, element, seed + 2, wild), output = tensor(batch * tokens * l.channels, element, seed + 3, true);
    Bytes const state = tensor(batch * l.channels * (l.taps - 1), element, seed + 4, wild);
    convolution::Tensors const x{in.get(), weight.get(), input.one_in(2) ? bias.get() : nullptr, output.get(), state.get(), tokens};
    still_fuzz::Backwards host(static_cast<int>(input.between(0, count_instruction_sets() - 1)));
    convolution::convolve(l, x, batch, brought.data(), host);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    still_fuzz::Input input(data, size);
    if (input.one_in(4))
        convolve(input);
    else
        attend(input);
    return 0;
}
