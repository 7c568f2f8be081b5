// The states of a package: numbers of rows after a number of tokens, by the growth rules of its manifest.
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
    std::vector<int64_t> shape; // for a batch of one sequence
};

// Rows of a state after `tokens` tokens: rows * max(0, ceil(tokens / per) - lag), or those of the whole capacity if the rule is fixed.
// The only C++ code that evaluates growth rules; see graphs/still_graphs/states.py for Python.
int64_t rows_after(Json const& rule, int64_t tokens, int64_t capacity_tokens);

// The states of the package with room for `tokens` tokens of one sequence. Each has at least one row, because dimensions of length 0 crash
// some versions of TensorRT. Throws still::Error if the capacity is smaller.
std::vector<State> states_for(Json const& manifest, int64_t tokens);

// Bytes of a state; throws still::Error on overflow.
size_t size_bytes(State const& state);

} // namespace still
