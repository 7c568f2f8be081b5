#include "kernel.h"

#include <algorithm>
#include <stdexcept>

#include "../../core/error.h"

namespace still_cpu
{

using still::fail;

Kept HostCall::kept(std::string const& past)
{
    std::string const scale = past + "_scale";
    bool const coded = std::any_of(spec.inputs.begin(), spec.inputs.end(), [&](auto const& tensor) { return tensor.name == scale; });
    return {state(past.c_str()), coded ? state<float>(scale.c_str()) : nullptr};
}

size_t HostCall::place_of(char const* input) const
{
    for (size_t place = 0; place < spec.inputs.size(); ++place)
        if (spec.inputs[place].name == input)
            return place;
    throw std::logic_error("the kernel of " + spec.name + " reads the input " + input + ", which the OpSpec has not");
}

still::Call bind(still::Op const& op, std::vector<still::Tensor> const& tensors)
{
    still::Call call = op.bind(tensors);
    if (call.count != still::Type::kInt64 && call.count != still::Type::kNone)
        fail(op.spec().name, ": counts are ", still::type_name(call.count), "; the CPU's kernel reads int64.");
    return call;
}

int choice(still::Op const& op, char const* name)
{
    for (still::AttributeSpec const& spec : op.spec().attributes)
        if (spec.name == name)
            return static_cast<int>(
                std::find(spec.choices.begin(), spec.choices.end(), op.attributes().at(name).text) - spec.choices.begin());
    throw std::logic_error(name);
}

int integer(still::Op const& op, char const* name, int least)
{
    constexpr int64_t most = 1 << 24;
    int64_t const value = op.attributes().at(name).integer;
    if (value < least || value > most)
        fail(op.spec().name, ": ", name, "=", value, " is outside ", least, "..", most, ".");
    return static_cast<int>(value);
}

int dimension(still::Call const& call, char const* symbol, int64_t least, int64_t most)
{
    int64_t const size = call.size(symbol);
    if (size < least || size > most)
        fail(call.spec->name, ": dimension ", symbol, "=", size, " is outside ", least, "..", most, ".");
    return static_cast<int>(size);
}

Cache cache_of(still::Call const& call, bool half)
{
    auto const cache = call.attributes->find(still::kCache);
    bool const codes = cache != call.attributes->end() && cache->second.text == "int8";
    for (still::TensorSpec const& tensor : call.spec->inputs)
        if (tensor.narrow && call.has(tensor.name) && call.has(tensor.name + "_scale") != codes)
            fail(call.spec->name, ": ", tensor.name, "_scale goes with cache=\"int8\", and only with it.");
    if (codes && half)
        fail(call.spec->name, ": states in 8 bits beside float16 activations have no kernel on the CPU; export with --dtype float32.");
    return codes ? Cache::kCodes : !half && call.kept == still::Type::kFloat16 ? Cache::kHalf : Cache::kAlike;
}

void check_heads(still::Call const& call)
{
    if (call.size("H") % call.size("HK"))
        fail(call.spec->name, ": ", call.size("H"), " query heads are no multiple of ", call.size("HK"), ".");
}

void check_counts(still::OpSpec const& spec, int row, int64_t past, int64_t brought, int64_t tokens)
{
    if (past < 0 || past > kMostTokens || brought < 0 || brought > tokens)
        fail(spec.name, ": sequence ", row, " has past_length ", past, " and new_tokens ", brought, "; expected 0 to ", kMostTokens,
            ", and new_tokens at most ", tokens, ".");
}

void check_rows(still::OpSpec const& spec, int batch, int64_t const* past, int64_t const* brought, int64_t tokens, int64_t room)
{
    for (int row = 0; row < batch; ++row)
    {
        int64_t const before = past ? past[row] : 0;
        check_counts(spec, row, before, brought[row], tokens);
        if (before + brought[row] > room)
            fail(spec.name, ": sequence ", row, " grows to ", before + brought[row], " tokens; the state has room for ", room,
                ". Give a larger state.");
    }
}

} // namespace still_cpu
