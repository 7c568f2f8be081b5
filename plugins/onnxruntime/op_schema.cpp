#include "op_schema.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>

#include "../core/generated/op_specs.h"

namespace still_cpu
{
namespace
{

std::string list(std::optional<std::vector<int64_t>> const& shape)
{
    if (!shape)
        return "absent";
    std::ostringstream out;
    out << "[";
    for (size_t i = 0; i < shape->size(); ++i)
        out << (i ? ", " : "") << (*shape)[i];
    out << "]";
    return out.str();
}

// Place of the node's value among the attribute's choices, which stand in the order of the enums.
int choice(Attributes const& attributes, char const* name)
{
    for (still::AttributeSpec const& spec : op_spec().attributes)
        if (spec.name == name)
        {
            std::string const value = attributes.text(name, spec.text);
            auto const found = std::find(spec.choices.begin(), spec.choices.end(), value);
            if (found != spec.choices.end())
                return static_cast<int>(found - spec.choices.begin());
            std::string known;
            for (std::string const& c : spec.choices)
                known += (known.empty() ? "" : ", ") + c;
            throw Refused(std::string("still::HybridAttention: ") + name + "=\"" + value + "\" is unknown; known: " + known
                          + ". Update the library, or run without it.");
        }
    throw std::logic_error(name);
}

int64_t number(Attributes const& attributes, char const* name, int64_t least)
{
    for (still::AttributeSpec const& spec : op_spec().attributes)
        if (spec.name == name)
        {
            int64_t const value = attributes.integer(name, spec.integer);
            if (value < least || value > (1 << 24))
                throw Refused(std::string("still::HybridAttention: ") + name + "=" + std::to_string(value) + " is out of range.");
            return value;
        }
    throw std::logic_error(name);
}

} // namespace

still::OpSpec const& op_spec()
{
    static still::OpSpec const spec = []
    {
        for (still::OpSpec const& s : still::make_op_specs())
            if (s.name == "HybridAttention")
            {
                static char const* const inputs[] = {"query", "key", "value", "gate", "feature_q_weight", "feature_k_weight",
                    "window_factor", "new_tokens", "past_length", "past_window_key", "past_window_value", "past_window_score",
                    "past_salient_key", "past_salient_value", "past_salient_score", "past_kv_state", "past_z_state"};
                if (s.version != 1 || s.inputs.size() != kInputs || s.outputs.size() != kOutputs)
                    throw std::logic_error("the OpSpec of HybridAttention has changed");
                for (size_t i = 0; i < kInputs; ++i)
                    if (s.inputs[i].name != inputs[i])
                        throw std::logic_error("the OpSpec's input " + s.inputs[i].name + " is not where this source has it");
                return s;
            }
        throw std::logic_error("no OpSpec of HybridAttention");
    }();
    return spec;
}

Layer read_attributes(Attributes const& attributes, bool half)
{
    Layer l{};
    l.chunk = static_cast<int>(number(attributes, "chunk_size", 1));
    l.salient = static_cast<int>(number(attributes, "salient_per_chunk", 0));
    l.scope = static_cast<Scope>(choice(attributes, "select_scope"));
    l.saliency = static_cast<Saliency>(choice(attributes, "saliency"));
    l.map = static_cast<FeatureMap>(choice(attributes, "feature_map"));
    l.sliding = choice(attributes, "local") == 1;
    l.window = static_cast<int>(number(attributes, "window_size", 0));
    l.window = l.window ? l.window : l.chunk;
    l.epsilon = attributes.real("mix_epsilon", 1e-6f);
    l.phantom = number(attributes, "phantom_first_chunk", 0) != 0;
    l.overflow = static_cast<Overflow>(choice(attributes, "overflow"));
    l.half = half;
    if (l.salient > l.chunk || l.window > l.chunk || (l.sliding && l.salient && l.window != l.chunk) || (l.sliding && l.phantom))
        throw Refused("still::HybridAttention: chunk_size, salient_per_chunk, window_size and phantom_first_chunk contradict each other.");
    return l;
}

Sizes read_shapes(Layer layer, Shapes const& shapes)
{
    std::vector<still::TensorSpec> const& inputs = op_spec().inputs;
    std::map<std::string, int64_t> known = {{"2*C", 2 * static_cast<int64_t>(layer.chunk)}};
    bool const both = layer.map == FeatureMap::kNormPreserved || layer.map == FeatureMap::kSoftmaxBothSigns;
    layer.weight_heads = 0;
    for (size_t i = 0; i < kInputs; ++i)
    {
        if (!shapes[i] && inputs[i].optional)
            continue;
        bool fits = shapes[i] && shapes[i]->size() == inputs[i].shape.size();
        for (size_t d = 0; fits && d < shapes[i]->size(); ++d)
        {
            std::string const& symbol = inputs[i].shape[d];
            int64_t const size = (*shapes[i])[d];
            if (size < 0 || size > kMostTokens)
                throw Refused("still::HybridAttention: " + inputs[i].name + " is " + list(shapes[i]) + ": dimension " + symbol
                              + " is out of range.");
            if (inputs[i].weight && symbol == "H" && inputs[i].shape.size() > 1)
            {
                layer.weight_heads = i == kFeatureQWeight ? static_cast<int>(size) : layer.weight_heads;
                fits = size == layer.weight_heads && (size == 1 || size == known["H"]);
                continue;
            }
            fits = known.emplace(symbol, size).first->second == size;
            if (symbol == "P")
                known.emplace("F", size * (both ? 2 : 1));
            if (symbol == "HK")
                known.emplace("HS", layer.scope == Scope::kHead ? known["H"] : size);
        }
        if (!fits)
        {
            std::string expected;
            for (std::string const& symbol : inputs[i].shape)
            {
                auto const value = known.find(symbol);
                expected += (expected.empty() ? "[" : ", ") + symbol + (value == known.end() ? "" : "=" + std::to_string(value->second));
            }
            throw Refused("still::HybridAttention: " + inputs[i].name + " is " + list(shapes[i]) + ", expected " + expected + "].");
        }
    }
    for (char const* symbol : {"H", "HK", "D", "P"})
        if (known[symbol] < 1 || known[symbol] > 65536)
            throw Refused(
                std::string("still::HybridAttention: dimension ") + symbol + "=" + std::to_string(known[symbol]) + " is out of range.");
    for (char const* symbol : {"B", "N"}) // counted in 32 bits
        if (known[symbol] > std::numeric_limits<int32_t>::max())
            throw Refused(
                std::string("still::HybridAttention: dimension ") + symbol + "=" + std::to_string(known[symbol]) + " is out of range.");
    if (known["H"] % known["HK"])
        throw Refused("still::HybridAttention: " + std::to_string(known["H"]) + " query heads are no multiple of "
                      + std::to_string(known["HK"]) + ".");
    if ((layer.overflow == Overflow::kFoldMinScore) != shapes[kPastSalientScore].has_value())
        throw Refused("still::HybridAttention: past_salient_score goes with overflow=\"fold_min_score\", and only with it.");
    layer.heads = static_cast<int>(known["H"]);
    layer.kv_heads = static_cast<int>(known["HK"]);
    layer.dim = static_cast<int>(known["D"]);
    layer.rows = static_cast<int>(known["P"]);
    layer.features = static_cast<int>(known["F"]);
    layer.slots = known["N"];
    return {layer, static_cast<int>(known["B"]), known["T"]};
}

void check_counts(Sizes const& sizes, int64_t const* past, int64_t const* brought)
{
    Layer const& l = sizes.layer;
    for (int row = 0; row < sizes.batch; ++row)
    {
        // Before they are added: the sum of what a file says may not fit.
        if (past[row] < 0 || past[row] > kMostTokens || brought[row] < 0 || brought[row] > sizes.tokens)
            throw Refused("still::HybridAttention: row " + std::to_string(row) + " has past_length " + std::to_string(past[row])
                          + " and new_tokens " + std::to_string(brought[row]) + "; expected 0 to " + std::to_string(kMostTokens)
                          + ", and new_tokens at most " + std::to_string(sizes.tokens) + ".");
        int64_t const length = past[row] + brought[row];
        int64_t const slots = l.salient * std::max<int64_t>(0, (length + l.chunk - 1) / l.chunk - 2);
        if (l.overflow == Overflow::kError && slots > l.slots)
            throw Refused("still::HybridAttention: row " + std::to_string(row) + " grows to " + std::to_string(length)
                          + " tokens, which fill " + std::to_string(slots) + " salient slots; the state has " + std::to_string(l.slots)
                          + ". Give a larger state.");
    }
}

} // namespace still_cpu
