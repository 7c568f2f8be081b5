#include "states.h"

#include "../core/error.h"

#include <algorithm>

namespace still
{
namespace
{

constexpr int64_t kLargest = int64_t{1} << 31; // most rows

} // namespace

int64_t rows_after(Json const& rule, int64_t tokens, int64_t capacity_tokens)
{
    int64_t const per = integer_of(rule.at("per"));
    int64_t const counted = rule.at("fixed").get<bool>() ? capacity_tokens : tokens;
    int64_t const blocks = counted / per + (counted % per != 0) - integer_of(rule.at("lag"));
    int64_t const rows = integer_of(rule.at("rows")) * std::min(std::max<int64_t>(0, blocks), kLargest);
    if (rows > kLargest)
        fail("a state of ", rows, " rows is too large.");
    return rows;
}

std::vector<State> states_for(Json const& manifest, int64_t tokens)
{
    Json const& capacity = manifest.at("capacity");
    int64_t const limit = integer_of(capacity.at("capacity_tokens"));
    Json::array_t const& entries = items_of(manifest.at("states"));
    bool const grows = std::any_of(entries.begin(), entries.end(), [](Json const& entry) {
        Json const& rule = entry.at("growth");
        return !rule.is_null() && integer_of(rule.at("rows")) > 0 && !rule.at("fixed").get<bool>();
    }); // an engine's profiles end at the capacity
    if ((grows || capacity.at("bounded").get<bool>()) && tokens > limit)
        fail(tokens, " tokens exceed this package's capacity of ", limit, " tokens. Use fewer, or export with a larger --capacity-tokens.");
    std::vector<State> states;
    for (Json const& entry : entries)
    {
        State state{text_of(entry.at("name")), text_of(entry.at("dtype")), {}};
        for (Json const& item : items_of(entry.at("shape")))
            state.shape.push_back(item.is_number() ? integer_of(item)
                    : text_of(item) == "batch"     ? 1
                                                   : std::max<int64_t>(1, rows_after(entry.at("growth"), tokens, limit)));
        states.push_back(std::move(state));
    }
    return states;
}

size_t size_bytes(State const& state)
{
    constexpr size_t most = size_t{1} << 48;
    size_t bytes = state.dtype == "int64" ? 8 : state.dtype == "float32" || state.dtype == "int32" ? 4 : 2;
    for (int64_t const size : state.shape)
    {
        if (static_cast<size_t>(size) > most / bytes)
            fail("state ", state.name, " is larger than any memory. Use fewer tokens, or export the model again.");
        bytes *= static_cast<size_t>(size);
    }
    return bytes;
}

} // namespace still
