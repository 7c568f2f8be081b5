// One op instance: its attributes, the check of its tensors, and the launches for their shapes. It has no code for particular ops:
// launches come from the plan in the archive.
#pragma once

#include "call.h"
#include "launches.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace still
{

// The attribute for the storage of key and value rows. Graphs have it only for 8-bit rows.
constexpr char kCache[] = "cache";
// Suffix of a dimension of 8-bit rows: a word has four codes.
constexpr char kWords[] = "/4";
constexpr int64_t kCodesOfWord = 4;

class Op
{
public:
    // Missing `attributes` have defaults. Bit i of `absent_inputs`: the spec's input i is not passed. States that exist only with 8-bit
    // rows need no bit.
    // Throws still::Error for an unknown name or value, or an absent input that is not optional.
    Op(OpSpec const& spec, std::map<std::string, AttributeValue> const& attributes, uint64_t absent_inputs);

    // A copy is not prepared, since two contexts must not share persistent memory.
    Op(Op const& other) : Op(*other.mSpec, other.mAttributes, other.mAbsent) {}
    Op(Op&&) = default;
    Op& operator=(Op const&) = delete;
    Op& operator=(Op&&) = default;
    ~Op() = default;

    OpSpec const& spec() const { return *mSpec; }
    std::map<std::string, AttributeValue> const& attributes() const { return mAttributes; }
    uint64_t absent_inputs() const { return mAbsent; }

    // Existing inputs and outputs, in order.
    std::vector<TensorSpec const*> const& inputs() const { return mInputs; }
    std::vector<TensorSpec const*> const& outputs() const { return mOutputs; }

    // Checks the inputs and returns the outputs. Throws still::Error with op, tensor, expected and actual value.
    std::vector<Tensor> infer(std::vector<Tensor> const& inputs) const;

    // The call that `infer` checks, for hosts that need its sizes; throws likewise.
    Call bind(std::vector<Tensor> const& inputs) const;

    // Bytes of workspace for any call with at most these sizes. Needs no GPU.
    size_t workspace_bytes(std::vector<Tensor> const& largest) const;

    // The launches for these shapes; loads their modules into the current context. Not on a stream under capture.
    Launches launches(std::vector<Tensor> const& inputs) const;

    // Evaluates the launches for these shapes, and stores them with their persistent memory.
    void prepare(std::vector<Tensor> const& inputs);

    // Loads into the current context every kernel that may serve this op, by its attributes and `activation` (kNone: any). For hosts that
    // know the shapes only at launch. Throws still::Error if there is no kernel, with a list of what exists.
    void preload(Type activation) const;

    // Whether prepare() was last called with these shapes.
    bool prepared(std::vector<Tensor> const& inputs) const { return mLaunches && mPrepared == inputs; }

    // Runs the prepared launches and nothing else, so it may be captured. Pointers in the order of inputs() and outputs().
    void launch(void const* const* inputs, void* const* outputs, void* workspace, void* stream) const;

private:
    OpSpec const* mSpec;
    std::map<std::string, AttributeValue> mAttributes;
    uint64_t mAbsent;
    std::shared_ptr<std::vector<TensorSpec> const> mOwn; // existing inputs, then outputs
    std::vector<TensorSpec const*> mInputs;
    std::vector<TensorSpec const*> mOutputs;
    std::vector<Tensor> mPrepared;
    std::shared_ptr<Launches const> mLaunches;
    std::shared_ptr<ZeroedMemory> mPersistent;
};

} // namespace still
