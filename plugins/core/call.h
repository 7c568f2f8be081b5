// A call of an op, bound: its tensors are checked against the OpSpec and each other, and give the sizes. All hosts use it.
#pragma once

#include "op_spec.h"
#include "tensor.h"

#include <map>
#include <string>
#include <vector>

namespace still
{

struct AttributeValue
{
    AttributeKind kind{AttributeKind::kInteger};
    int64_t integer{};
    double real{};
    std::string text;
};

// "window_key" of "present_window_key".
inline std::string state_name(std::string const& present) { return present.substr(sizeof("present_") - 1); }

// Facts about a call that a plan reads: attributes, sizes by symbol, types, and the optional tensors that exist.
class Call
{
public:
    // Checks `tensors`, the existing inputs, and derives sizes, types and outputs.
    // Throws still::Error with op, tensor, expected and actual value.
    void bind(std::vector<Tensor> const& tensors);

    // Sizes that are integer attributes.
    void take_attributes();

    int64_t size(std::string const& symbol) const; // "H", "2*C"; throws for an unknown symbol (a bug of the caller)
    bool has(std::string const& tensor) const { return tensors.count(tensor) > 0; }
    Tensor const& tensor(std::string const& name) const { return tensors.at(name); }
    bool knows(std::string const& symbol) const { return sizes.count(symbol) > 0; }
    [[noreturn]] void refuse(std::string const& what) const; // throws still::Error, prefixed by the op

    OpSpec const* spec{};
    std::map<std::string, AttributeValue> const* attributes{};
    std::vector<TensorSpec const*> const* inputs{};  // existing ones, in order
    std::vector<TensorSpec const*> const* outputs{}; // likewise
    std::map<std::string, int64_t> sizes; // by symbol, and "tokens" of all rows and "rows" of the state
    std::map<std::string, int64_t> weights; // first dimension of weights by its symbol: its size, or 1 if shared by all
    std::map<std::string, Tensor> tensors; // existing inputs and outputs, by name
    Type activation{Type::kNone};
    Type kept{Type::kNone}; // type of `narrow` tensors; kNone if there are none
    Type count{Type::kNone};

private:
    void bind_shape(TensorSpec const& spec, Tensor const& tensor);
};

} // namespace still
