#include "states.h"

#include "../core/error.h"

#include <algorithm>

namespace still
{
namespace
{

constexpr int64_t kLargest = int64_t{1} << 31; // of rows and of any dimension
constexpr size_t kMaxDimensions = 8;

int64_t number(Json const& rule, char const* name, int64_t least)
{
    int64_t const value = rule.at(name).integer();
    if (value < least || value > kLargest)
        fail("the manifest's growth rule has ", name, "=", value, ". Export the model again.");
    return value;
}

} // namespace

int64_t rows_after(Json const& rule, int64_t tokens, int64_t capacity_tokens)
{
    int64_t const per = number(rule, "per", 1);
    int64_t const counted = rule.at("fixed").boolean() ? capacity_tokens : tokens;
    int64_t const blocks = counted / per + (counted % per != 0) - number(rule, "lag", 0);
    int64_t const rows = number(rule, "rows", 0) * std::min(std::max<int64_t>(0, blocks), kLargest);
    if (rows > kLargest)
        fail("a state of ", rows, " rows is too large.");
    return rows;
}

std::vector<State> states_for(Json const& manifest, int64_t tokens)
{
    Json const& capacity = manifest.at("capacity");
    int64_t const limit = capacity.at("capacity_tokens").integer();
    if (capacity.at("bounded").boolean() && tokens > limit)
        fail(tokens, " tokens exceed this package's capacity of ", limit, " tokens. Use fewer, or export with a larger --capacity-tokens.");
    std::vector<State> states;
    for (Json const& entry : manifest.at("states").items())
    {
        State state{entry.at("name").string(), entry.at("dtype").string(), {}};
        if (entry.at("shape").items().size() > kMaxDimensions)
            fail("state ", state.name, " has more than ", kMaxDimensions, " dimensions. Export the model again.");
        for (Json const& item : entry.at("shape").items())
        {
            int64_t const size = item.kind() == Json::Kind::kNumber ? item.integer()
                : item.string() == "batch"                          ? 1
                                           : std::max<int64_t>(1, rows_after(entry.at("growth"), tokens, limit));
            if (size < 1 || size > kLargest)
                fail("state ", state.name, " has a dimension of ", size, ". Export the model again.");
            state.shape.push_back(size);
        }
        states.push_back(std::move(state));
    }
    return states;
}

size_t size_bytes(State const& state, size_t item)
{
    constexpr size_t most = size_t{1} << 48;
    size_t bytes = item;
    for (int64_t const size : state.shape)
    {
        if (static_cast<size_t>(size) > most / bytes)
            fail("state ", state.name, " is larger than any memory. Use fewer tokens, or export the model again.");
        bytes *= static_cast<size_t>(size);
    }
    return bytes;
}

} // namespace still
