// One op instance: its attributes, the check of its tensors, and the launches for their shapes. Knows no op by name: what to launch
// comes from the plan in the archive.
#pragma once

#include "op_spec.h"
#include "launches.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace still
{

constexpr int kMaxRank = 8;

// Values are part of the C ABI.
enum class Type : int32_t { kNone = 0, kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3, kInt32 = 4, kInt64 = 5 };

char const* type_name(Type type);
size_t type_bytes(Type type);

struct Tensor
{
    Type type{Type::kNone};
    int32_t rank{};
    int64_t dims[kMaxRank]{};

    bool operator==(Tensor const& other) const;
    std::string shape() const; // "[2, 64]"
    size_t bytes() const;
};

struct AttributeValue
{
    AttributeKind kind{AttributeKind::kInteger};
    int64_t integer{};
    double real{};
    std::string text;
};

// Inputs of packed rows beside the op's own, in this order after them; they are of the counts' type.
constexpr char kQueryStart[] = "query_start"; // [B + 1], first token of each row, then the number of tokens
constexpr char kStateRow[] = "state_row";     // [B], row of the state that each row owns, distinct
constexpr char kMaxTokens[] = "max_tokens";   // [T]: only its size counts, the most tokens of a row; its address may be null

// "window_key" of "present_window_key".
inline std::string state_name(std::string const& present) { return present.substr(sizeof("present_") - 1); }

// What a plan sees of a call: attributes, sizes by symbol, types, and which optional tensors are there.
class Call
{
public:
    int64_t size(std::string const& symbol) const; // "H", "2*C"; throws for an unknown symbol (a bug of the caller)
    int64_t integer(std::string const& attribute) const;
    double real(std::string const& attribute) const;
    std::string const& text(std::string const& attribute) const;
    bool has(std::string const& tensor) const { return tensors.count(tensor) > 0; }
    Tensor const& tensor(std::string const& name) const;
    bool knows(std::string const& symbol) const { return sizes.count(symbol) > 0; }
    [[noreturn]] void refuse(std::string const& what) const; // throws still::Error, prefixed by the op

    OpSpec const* spec{};
    std::map<std::string, AttributeValue> const* attributes{};
    std::vector<TensorSpec const*> const* inputs{};  // those that exist, in order
    std::vector<TensorSpec const*> const* outputs{}; // likewise
    std::map<std::string, int64_t> sizes; // of symbols, and "tokens" of all rows and "rows" of the state
    std::map<std::string, Tensor> tensors; // inputs and outputs that exist, by name
    Type activation{Type::kNone};
    Type count{Type::kNone};
    bool packed{};
};

// How the rows of a batch lie: [B, T, ...] each, or one behind the other as [tokens, ...], each with a row of a larger state.
enum class Rows { kPadded, kPacked };

class Op
{
public:
    // `attributes` may leave out any; `absent_inputs` has bit i set where the spec's input i is not passed.
    // Throws still::Error for an unknown name or value, or an absent input that is not optional.
    //
    // With packed rows activations are [tokens, ...], past_* and present_* [rows, ...], new_tokens is no input, and query_start,
    // state_row and max_tokens follow the op's inputs. The host advances the lengths.
    Op(OpSpec const& spec, std::map<std::string, AttributeValue> const& attributes, uint64_t absent_inputs, Rows rows = Rows::kPadded);

    // A copy is not prepared: two contexts must not share persistent memory.
    Op(Op const& other) : Op(*other.mSpec, other.mAttributes, other.mAbsent, other.mRows) {}
    Op(Op&&) = default;
    Op& operator=(Op const&) = delete;
    Op& operator=(Op&&) = default;
    ~Op() = default;

    OpSpec const& spec() const { return *mSpec; }
    std::map<std::string, AttributeValue> const& attributes() const { return mAttributes; }
    uint64_t absent_inputs() const { return mAbsent; }

    // Inputs and outputs that exist, in order.
    std::vector<TensorSpec const*> const& inputs() const { return mInputs; }
    std::vector<TensorSpec const*> const& outputs() const { return mOutputs; }

    // Checks the inputs and gives the outputs. Throws still::Error naming op, tensor, what was expected and what came.
    std::vector<Tensor> infer(std::vector<Tensor> const& inputs) const;

    // Bytes that any call with at most these sizes needs. Needs no GPU.
    size_t workspace_bytes(std::vector<Tensor> const& largest) const;

    // Evaluates the launches for these shapes and loads their modules into the current context. Not for a stream under capture.
    void prepare(std::vector<Tensor> const& inputs);

    // Loads into the current context every kernel that may serve this op, as far as attributes and `activation` (kNone: any)
    // tell; for hosts that learn the shapes only when they launch.
    void preload(Type activation) const;

    // True when prepare() was last called with these shapes.
    bool prepared(std::vector<Tensor> const& inputs) const { return mLaunches && mPrepared == inputs; }

    // Launches what was prepared; only launches, so it may be captured. Pointers in the order of inputs() and outputs().
    void launch(void const* const* inputs, void* const* outputs, void* workspace, void* stream) const;

private:
    Call bind(std::vector<Tensor> const& inputs) const;

    OpSpec const* mSpec;
    std::map<std::string, AttributeValue> mAttributes;
    uint64_t mAbsent;
    Rows mRows;
    std::shared_ptr<std::vector<TensorSpec> const> mPacked; // inputs, then outputs, as packed rows have them
    std::vector<TensorSpec const*> mInputs;
    std::vector<TensorSpec const*> mOutputs;
    std::vector<Tensor> mPrepared;
    std::shared_ptr<Launches const> mLaunches;
    std::shared_ptr<ZeroedMemory> mPersistent;
};

} // namespace still
