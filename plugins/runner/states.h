// The states of a package: how many rows each has after how many tokens, by the growth rules of its manifest.
#pragma once

#include "../core/json.h"

#include <cstdint>
#include <string>
#include <vector>

namespace still
{

struct State
{
    std::string name; // the engine has past_<name> and present_<name>
    std::string dtype;
    std::vector<int64_t> shape; // of a batch of one sequence
};

// Rows of a state after `tokens` tokens: rows * max(0, ceil(tokens / per) - lag), for all tokens of the capacity where the rule is fixed.
// The one place in C++ that computes them; graphs/still_graphs/states.py is Python's.
int64_t rows_after(Json const& rule, int64_t tokens, int64_t capacity_tokens);

// The states of the package with room for `tokens` tokens of one sequence; at least one row each, because dimensions of length 0 crash some
// versions of TensorRT. Throws still::Error where the capacity is smaller.
std::vector<State> states_for(Json const& manifest, int64_t tokens);

// Bytes of a state; throws still::Error if they exceed any machine's memory.
size_t size_bytes(State const& state);

} // namespace still
