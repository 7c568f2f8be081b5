// Attributes, shapes and counts of a call, as the custom op of ONNX Runtime takes them from a graph and its inputs.
#include "../onnxruntime/hybrid_attention.h"
#include "input.h"

#include <array>
#include <cstdlib>

namespace
{

struct Guessed : still_ort::Attributes
{
    mutable still_fuzz::Input* input;

    explicit Guessed(still_fuzz::Input& from) : input(&from) {}

    int64_t integer(char const*, int64_t otherwise) const override
    {
        if (input->one_in(3))
            return input->extreme();
        return input->one_in(2) ? otherwise : input->between(0, 8);
    }
    float real(char const*, float otherwise) const override { return input->one_in(2) ? otherwise : input->raw<float>(); }
    std::string text(char const* name, std::string const& otherwise) const override
    {
        for (still::AttributeSpec const& spec : still_ort::hybrid::op_spec().attributes)
            if (spec.name == name && !spec.choices.empty() && input->one_in(2))
                return spec.choices[static_cast<size_t>(input->between(0, static_cast<int64_t>(spec.choices.size()) - 1))];
        return input->one_in(16) ? "unknown" : otherwise;
    }
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    using namespace still_ort;
    using namespace still_ort::hybrid;
    using namespace still_cpu::hybrid;
    still_fuzz::Input input(data, size);
    try
    {
        Layer const layer = read_attributes(Guessed(input), input.one_in(2));
        // Mostly shapes that fit each other, with some dimensions, ranks and tensors that do not.
        int64_t const batch = input.between(0, 3), tokens = input.between(0, 5), kv_heads = input.between(1, 3);
        int64_t const heads = kv_heads * input.between(1, 3), dim = input.between(1, 8), rows = input.between(1, 8);
        bool const both = layer.map == FeatureMap::kNormPreserved || layer.map == FeatureMap::kSoftmaxBothSigns;
        auto const size_of = [&](std::string const& symbol) -> int64_t
        {
            if (symbol == "B") return batch;
            if (symbol == "T") return tokens;
            if (symbol == "H") return heads;
            if (symbol == "HK") return kv_heads;
            if (symbol == "HS") return layer.scope == Scope::kHead ? heads : kv_heads;
            if (symbol == "D") return dim;
            if (symbol == "P") return rows;
            if (symbol == "F") return both ? 2 * rows : rows;
            if (symbol == "N") return 4;
            return 2 * static_cast<int64_t>(layer.chunk);
        };
        Shapes shapes(kInputs);
        for (size_t i = 0; i < kInputs; ++i)
        {
            still::TensorSpec const& spec = op_spec().inputs[i];
            bool const wanted = spec.name != "past_salient_score" || layer.overflow == Overflow::kFoldMinScore;
            if (input.one_in(64) || (spec.optional && (!wanted || input.one_in(2))))
                continue;
            shapes[i].emplace();
            if (input.one_in(64))
                continue; // a scalar
            for (std::string const& symbol : spec.shape)
                shapes[i]->push_back(input.one_in(64) ? input.extreme() : size_of(symbol));
            if (input.one_in(64))
                shapes[i]->push_back(input.extreme());
        }
        Sizes const sizes = read_shapes(layer, shapes);
        if (sizes.batch < 0 || sizes.batch > 8)
            return 0;
        std::array<int64_t, 8> past{}, brought{};
        for (size_t row = 0; row < static_cast<size_t>(sizes.batch); ++row)
        {
            past[row] = input.one_in(2) ? input.extreme() : input.between(0, 64);
            brought[row] = input.one_in(2) ? input.extreme() : input.between(0, 5);
        }
        check_counts(sizes, past.data(), brought.data());
        for (size_t row = 0; row < static_cast<size_t>(sizes.batch); ++row)
            if (past[row] < 0 || brought[row] < 0 || brought[row] > sizes.tokens || past[row] + brought[row] < past[row])
                std::abort(); // what passes must be what the kernels are written for
        scratch_size(sizes.layer, sizes.batch, sizes.tokens);
    }
    catch (Refused const&)
    {
    }
    return 0;
}
