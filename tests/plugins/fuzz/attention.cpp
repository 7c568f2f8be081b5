// The CPU kernels of softmax attention on calls that the schema lets pass, whatever numbers cache and activations hold.
#include "attention/cpu/attention.h"
#include "input.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

using namespace still_cpu;
using still_fuzz::floats;
using still_fuzz::tensor;

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    still_fuzz::Input input(data, size);
    softmax::Layer l{};
    l.kv_heads = static_cast<int>(input.between(1, 3));
    l.heads = l.kv_heads * static_cast<int>(input.one_in(8) ? input.between(1, 140) : input.between(1, 4));
    l.dim = static_cast<int>(input.between(1, 36));
    l.half = input.one_in(2);
    l.cache = l.half ? Cache::kAlike : static_cast<Cache>(input.between(0, 2));
    int const batch = static_cast<int>(input.between(1, 3));
    int64_t const tokens = input.one_in(2) ? 1 : input.between(1, 150);
    std::vector<int64_t> past, brought;
    int64_t needed = 0;
    for (int row = 0; row < batch; ++row)
    {
        past.push_back(input.one_in(2) ? input.between(0, 900) : input.between(0, 20));
        brought.push_back(input.one_in(2) ? tokens : input.between(0, tokens));
        needed = std::max(needed, past.back() + brought.back());
    }
    l.rows = needed + input.between(0, 20);
    bool const wild = input.one_in(3);
    uint32_t const seed = input.raw<uint32_t>();
    auto const query = tensor(batch * tokens * l.heads * l.dim, l.element_size(), seed, wild);
    auto const key = tensor(batch * tokens * l.kv_heads * l.dim, l.element_size(), seed + 1, wild);
    auto const value = tensor(batch * tokens * l.kv_heads * l.dim, l.element_size(), seed + 2, wild);
    auto const output = tensor(batch * tokens * l.heads * l.dim, l.element_size(), seed + 3, true);
    int64_t const kept_rows = batch * l.kv_heads * l.rows;
    bool const codes = l.cache == Cache::kCodes;
    int const kept = codes ? 1 : l.half || l.cache == Cache::kHalf ? 2 : 4;
    auto const key_cache = tensor(kept_rows * l.dim, kept, seed + 4, wild), value_cache = tensor(kept_rows * l.dim, kept, seed + 5, wild);
    auto const key_scale = tensor(kept_rows, 4, seed + 6, wild), value_scale = tensor(kept_rows, 4, seed + 7, wild);
    softmax::Tensors const x{query.get(), key.get(), value.get(), output.get(),
        {key_cache.get(), codes ? floats(key_scale) : nullptr},
        {value_cache.get(), codes ? floats(value_scale) : nullptr}, tokens};
    still_fuzz::Backwards host(static_cast<int>(input.between(0, count_instruction_sets() - 1)));
    softmax::attention(l, x, batch, past.data(), brought.data(), host);
    // A mean of values within 2 of 0; halves are within 1.
    for (int64_t i = 0; !wild && !l.half && !codes && i < batch * tokens * l.heads * l.dim; ++i)
        if (!(std::fabs(floats(output)[i]) <= 2.001f))
            std::abort();
    return 0;
}
