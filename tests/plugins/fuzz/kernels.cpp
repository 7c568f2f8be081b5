// The CPU kernels on calls that the schema lets pass, whatever numbers state and activations hold.
#include "hybrid_attention/cpu/hybrid_attention.h"
#include "input.h"

#include <algorithm>
#include <vector>

using namespace still_cpu::hybrid;
using still_fuzz::Bytes;
using still_fuzz::floats;
using still_fuzz::tensor;

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
    Bytes const query = tensor(b * tokens * l.heads * l.dim, element, seed, wild);
    Bytes const key = tensor(b * tokens * l.kv_heads * l.dim, element, seed + 1, wild);
    Bytes const value = tensor(b * tokens * l.kv_heads * l.dim, element, seed + 2, wild);
    Bytes const gate = tensor(b * tokens * l.heads * l.dim, element, seed + 3, wild);
    Bytes const feature_q = tensor(int64_t{l.weight_heads} * l.rows * l.dim, element, seed + 4, wild);
    Bytes const feature_k = tensor(int64_t{l.weight_heads} * l.rows * l.dim, element, seed + 5, wild);
    Bytes const factor = tensor(l.heads, 4, seed + 6, wild);
    Bytes const output = tensor(b * tokens * l.heads * l.dim, element, seed + 7, wild);
    Bytes const window_key = tensor(b * l.kv_heads * 2 * l.chunk * l.dim, kept, seed + 8, wild);
    Bytes const window_value = tensor(b * l.kv_heads * 2 * l.chunk * l.dim, kept, seed + 9, wild);
    Bytes const window_score = tensor(b * l.heads * 2 * l.chunk, 4, seed + 10, wild);
    Bytes const salient_key = tensor(b * select_heads * l.slots * l.dim, kept, seed + 11, wild);
    Bytes const salient_value = tensor(b * select_heads * l.slots * l.dim, kept, seed + 12, wild);
    Bytes const kv_state = tensor(b * l.heads * l.features * l.dim, 4, seed + 14, wild);
    Bytes const z_state = tensor(b * l.heads * l.features, 4, seed + 15, wild);
    Tensors x{};
    x.query = query.get(), x.key = key.get(), x.value = value.get();
    x.gate = input.one_in(2) ? gate.get() : nullptr;
    x.feature_q_weight = feature_q.get(), x.feature_k_weight = feature_k.get();
    x.window_factor = input.one_in(2) ? floats(factor) : nullptr;
    x.output = output.get();
    int64_t const ring_rows = b * l.kv_heads * 2 * l.chunk, cache_rows = b * select_heads * l.slots;
    Bytes const key_scale = tensor(ring_rows, 4, seed + 16, wild), value_scale = tensor(ring_rows, 4, seed + 17, wild);
    Bytes const salient_key_scale = tensor(cache_rows, 4, seed + 18, wild), salient_value_scale = tensor(cache_rows, 4, seed + 19, wild);
    auto const rows = [&](Bytes const& codes, Bytes const& scales)
    { return still_cpu::Kept{codes.get(), l.cache == still_cpu::Cache::kCodes ? floats(scales) : nullptr}; };
    x.window_key = rows(window_key, key_scale), x.window_value = rows(window_value, value_scale), x.window_score = floats(window_score);
    x.salient_key = rows(salient_key, salient_key_scale), x.salient_value = rows(salient_value, salient_value_scale);
    x.kv_state = floats(kv_state), x.z_state = floats(z_state);
    x.tokens = tokens;
    still_fuzz::Backwards host(static_cast<int>(input.between(0, still_cpu::count_instruction_sets() - 1)));
    hybrid_attention(l, x, batch, past.data(), brought.data(), host);
    return 0;
}
