#include "joined_states.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "../core/error.h"

namespace still_ort
{
namespace
{

int64_t number(std::string const& text, still::OpSpec const& spec)
{
    constexpr size_t digits = 12; // enough for any dimension; products of a few stay in 64 bits
    bool const fits = !text.empty() && text.size() <= digits && text.find_first_not_of("0123456789") == std::string::npos;
    if (!fits)
        still::fail(spec.name, ": states has the dimension \"", text, "\".");
    return std::stoll(text);
}

} // namespace

size_t before_states(std::vector<still::TensorSpec> const& tensors)
{
    return static_cast<size_t>(
        std::find_if(tensors.begin(), tensors.end(), [](still::TensorSpec const& tensor) { return tensor.state; }) - tensors.begin());
}

JoinedStates::JoinedStates(still::OpSpec const& spec, std::string const& text)
    : first(before_states(spec.inputs)), first_out(before_states(spec.outputs))
{
    std::istringstream entries(text);
    for (std::string entry; std::getline(entries, entry, ';');)
    {
        size_t const colon = std::min(entry.find(':'), entry.size());
        std::string const name = "past_" + entry.substr(0, colon);
        size_t input = first;
        while (input < spec.inputs.size() && spec.inputs[input].name != name)
            ++input;
        if (input == spec.inputs.size() || (!places.empty() && places.back().input >= input))
            still::fail(spec.name, ": states has \"", entry, "\", which is no state of the op, or not in its order.");
        int64_t dims[still::kMaxRank]{};
        int64_t rank = 0, size = 1;
        std::istringstream numbers(entry.substr(std::min(colon + 1, entry.size())));
        for (std::string dim; std::getline(numbers, dim, ',');)
        {
            if (rank + 1 == still::kMaxRank)
                still::fail(spec.name, ": states has too many dimensions in \"", entry, "\".");
            dims[rank++] = number(dim, spec);
            if (__builtin_mul_overflow(size, dims[rank - 1], &size) || size > still::kMaxSize)
                still::fail(spec.name, ": states has a state that is too large, \"", entry, "\".");
        }
        size_t const tensor = spec.inputs[input].type == still::ElementType::kFloat32;
        places.push_back({input, tensor, sizes[tensor], still::make_tensor(still::Type::kNone, dims, rank, name)});
        sizes[tensor] += size;
    }
}

JoinedStates::Place const& JoinedStates::at(size_t input) const
{
    for (Place const& place : places)
        if (place.input == input)
            return place;
    throw std::logic_error("no joined state");
}

} // namespace still_ort
