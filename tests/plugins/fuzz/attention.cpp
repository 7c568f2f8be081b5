// The CPU kernels of softmax attention on calls that the schema lets pass, whatever numbers cache and activations hold.
#include "attention/cpu/attention.h"
#include "input.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

namespace
{

using namespace still_cpu;

// Memory of exactly the bytes that a tensor has, so that the sanitizer sees a step over its end.
std::unique_ptr<char[]> tensor(int64_t count, int element, uint32_t seed, bool wild)
{
    std::unique_ptr<char[]> bytes(new char[static_cast<size_t>(count) * static_cast<size_t>(element)]);
    std::minstd_rand random(seed + 1);
    for (int64_t i = 0; i < count; ++i)
    {
        float value = static_cast<float>(random() % 4001) / 1000 - 2;
        uint16_t bits = static_cast<uint16_t>(random() % 2 ? 0x3800u | random() % 1024 : 0xb800u | random() % 1024);
        if (wild && random() % 16 == 0)
            value = random() % 2 ? INFINITY : NAN, bits = static_cast<uint16_t>(random());
        if (element == 1) // any byte is a code
            bytes[static_cast<size_t>(i)] = static_cast<char>(random());
        else if (element == 2)
            std::memcpy(bytes.get() + 2 * i, &bits, 2);
        else
            std::memcpy(bytes.get() + 4 * i, &value, 4);
    }
    return bytes;
}

} // namespace

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
        {key_cache.get(), codes ? reinterpret_cast<float*>(key_scale.get()) : nullptr},
        {value_cache.get(), codes ? reinterpret_cast<float*>(value_scale.get()) : nullptr}, tokens};
    std::unique_ptr<char[]> const scratch(new char[softmax::scratch_size(l, batch, past.data(), brought.data())]);
    Host const host{nullptr, [](void*, void (*task)(void*, size_t), size_t total, void* argument)
        {
            for (size_t i = total; i > 0; --i) // backwards: no task may rest on the one before it
                task(argument, i - 1);
        }};
    int const set = static_cast<int>(input.between(0, count_instruction_sets() - 1));
    softmax::attention(l, x, batch, past.data(), brought.data(), scratch.get(), host, set);
    // A mean of values within 2 of 0; halves are within 1.
    for (int64_t i = 0; !wild && !l.half && !codes && i < batch * tokens * l.heads * l.dim; ++i)
        if (!(std::fabs(reinterpret_cast<float const*>(output.get())[i]) <= 2.001f))
            std::abort();
    return 0;
}
