// The CPU kernels on calls that the schema lets pass, whatever numbers state and activations hold.
#include "hybrid_attention/cpu/hybrid_attention.h"
#include "input.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

namespace
{

using namespace still_cpu::hybrid;
using still_cpu::Host;

// Memory of exactly the bytes that a tensor has, so that the sanitizer sees a step over its end; filled with what numbers can be.
struct Blob
{
    std::unique_ptr<char[]> bytes;
    size_t size;

    Blob(int64_t count, int element, uint32_t seed, bool wild) : bytes(new char[static_cast<size_t>(count) * static_cast<size_t>(element)]),
                                                                  size(static_cast<size_t>(count) * static_cast<size_t>(element))
    {
        std::minstd_rand random(seed + 1);
        static constexpr float kSpecial[] = {0, -0.0f, 1e30f, -1e30f, 1e-40f, __builtin_inff(), -__builtin_inff(), __builtin_nanf("")};
        for (int64_t i = 0; i < count; ++i)
        {
            float const number = static_cast<float>(random() % 4001) / 1000 - 2;
            float const value = wild && random() % 16 == 0 ? kSpecial[random() % 8] : number;
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            // Half: sign, a low exponent and what is left of the fraction; any bits are a number, infinity or NaN.
            uint16_t const half = static_cast<uint16_t>(wild && random() % 16 == 0 ? random() : (bits >> 16 & 0x8000u) | 0x3800u | (bits >> 13 & 0x3ffu));
            if (element == 4)
                std::memcpy(bytes.get() + 4 * i, &value, 4);
            else if (element == 2)
                std::memcpy(bytes.get() + 2 * i, &half, 2);
            else // any byte is a code
                bytes[static_cast<size_t>(i)] = static_cast<char>(random());
        }
    }
    float* floats() const { return reinterpret_cast<float*>(bytes.get()); }
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    still_fuzz::Input input(data, size);
    Layer l{};
    l.chunk = static_cast<int>(input.one_in(6) ? input.between(33, 70) : input.between(1, 20));
    l.salient = static_cast<int>(input.between(0, std::min(l.chunk, 9)));
    l.scope = static_cast<Scope>(input.between(0, 2));
    l.saliency = static_cast<Saliency>(input.between(0, 1));
    l.map = static_cast<FeatureMap>(input.between(0, 5));
    l.sliding = input.one_in(4);
    l.window = l.sliding && !l.salient ? static_cast<int>(input.between(1, l.chunk)) : l.chunk;
    l.epsilon = input.one_in(4) ? input.raw<float>() : 1e-6f;
    l.phantom = !l.sliding && input.one_in(4);
    l.overflow = static_cast<Overflow>(input.between(0, 1));
    l.kv_heads = static_cast<int>(input.between(1, 3));
    l.heads = l.kv_heads * static_cast<int>(input.between(1, 3));
    l.dim = static_cast<int>(input.between(1, 36));
    l.rows = static_cast<int>(input.between(1, 36));
    l.features = l.rows * (l.map == FeatureMap::kNormPreserved || l.map == FeatureMap::kSoftmaxBothSigns ? 2 : 1);
    l.weight_heads = input.one_in(2) ? 1 : l.heads;
    l.half = input.one_in(2);
    l.cache = l.half ? still_cpu::Cache::kAlike : static_cast<still_cpu::Cache>(input.between(0, 2));
    int const batch = static_cast<int>(input.between(1, 3)), element = l.element_size(), kept = l.kept_size();
    int64_t const tokens = input.one_in(2) ? 1 : input.between(1, 3 * l.chunk + 2);
    std::vector<int64_t> past, brought;
    int64_t needed = 0;
    for (int row = 0; row < batch; ++row)
    {
        bool const far = l.overflow != Overflow::kError && input.one_in(4);
        past.push_back(far ? (int64_t{1} << 40) - input.between(0, 100) : input.between(0, 6 * l.chunk));
        brought.push_back(input.one_in(2) ? tokens : input.between(0, tokens));
        needed = std::max<int64_t>(needed, l.salient * std::max<int64_t>(0, (past.back() + brought.back() + l.chunk - 1) / l.chunk - 2));
    }
    // Cuts that give several parts, and caches too small or larger than needed where the policy allows it.
    l.slots = l.overflow == Overflow::kError ? needed + input.between(0, 300) : l.salient * input.between(0, 40 / std::max(1, l.salient));
    bool const wild = input.one_in(3);
    uint32_t const seed = input.raw<uint32_t>();
    int64_t const b = batch, select_heads = l.select_heads();
    Blob const query(b * tokens * l.heads * l.dim, element, seed, wild), key(b * tokens * l.kv_heads * l.dim, element, seed + 1, wild);
    Blob const value(b * tokens * l.kv_heads * l.dim, element, seed + 2, wild), gate(query.size / static_cast<size_t>(element), element, seed + 3, wild);
    Blob const feature_q(int64_t{l.weight_heads} * l.rows * l.dim, element, seed + 4, wild);
    Blob const feature_k(int64_t{l.weight_heads} * l.rows * l.dim, element, seed + 5, wild), factor(l.heads, 4, seed + 6, wild);
    Blob const output(b * tokens * l.heads * l.dim, element, seed + 7, wild);
    Blob const window_key(b * l.kv_heads * 2 * l.chunk * l.dim, kept, seed + 8, wild);
    Blob const window_value(b * l.kv_heads * 2 * l.chunk * l.dim, kept, seed + 9, wild), window_score(b * l.heads * 2 * l.chunk, 4, seed + 10, wild);
    Blob const salient_key(b * select_heads * l.slots * l.dim, kept, seed + 11, wild);
    Blob const salient_value(b * select_heads * l.slots * l.dim, kept, seed + 12, wild);
    Blob const kv_state(b * l.heads * l.features * l.dim, 4, seed + 14, wild), z_state(b * l.heads * l.features, 4, seed + 15, wild);
    Tensors x{};
    x.query = query.bytes.get(), x.key = key.bytes.get(), x.value = value.bytes.get();
    x.gate = input.one_in(2) ? gate.bytes.get() : nullptr;
    x.feature_q_weight = feature_q.bytes.get(), x.feature_k_weight = feature_k.bytes.get();
    x.window_factor = input.one_in(2) ? factor.floats() : nullptr;
    x.output = output.bytes.get();
    int64_t const ring_rows = b * l.kv_heads * 2 * l.chunk, cache_rows = b * select_heads * l.slots;
    Blob const key_scale(ring_rows, 4, seed + 16, wild), value_scale(ring_rows, 4, seed + 17, wild);
    Blob const salient_key_scale(cache_rows, 4, seed + 18, wild), salient_value_scale(cache_rows, 4, seed + 19, wild);
    auto const rows = [&](Blob const& codes, Blob const& scales)
    { return still_cpu::Kept{codes.bytes.get(), l.cache == still_cpu::Cache::kCodes ? scales.floats() : nullptr}; };
    x.window_key = rows(window_key, key_scale), x.window_value = rows(window_value, value_scale), x.window_score = window_score.floats();
    x.salient_key = rows(salient_key, salient_key_scale), x.salient_value = rows(salient_value, salient_value_scale);
    x.kv_state = kv_state.floats(), x.z_state = z_state.floats();
    x.tokens = tokens;
    std::unique_ptr<char[]> const scratch(new char[scratch_size(l, batch, tokens)]);
    Host const host{nullptr, [](void*, void (*task)(void*, size_t), size_t total, void* argument)
        {
            for (size_t i = total; i > 0; --i) // backwards: no task may rest on the one before it
                task(argument, i - 1);
        }};
    int const set = static_cast<int>(input.between(0, still_cpu::count_instruction_sets() - 1));
    hybrid_attention(l, x, batch, past.data(), brought.data(), scratch.get(), host, set);
    return 0;
}
