// One op instance: its attributes, the check of its tensors, and the launches for their shapes. Knows no op by name: what to launch
// comes from the plan in the archive.
#pragma once

#include "call.h"
#include "launches.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace still
{

// The attribute that says how rows of keys and values are kept. Graphs have it where they are in 8 bits alone.
constexpr char kCache[] = "cache";
// A dimension of rows in 8 bits: four codes are a word.
constexpr char kWords[] = "/4";
constexpr int64_t kCodesOfWord = 4;

class Op
{
public:
    // `attributes` may leave out any; `absent_inputs` has bit i set where the spec's input i is not passed. Of states that only rows in
    // 8 bits have it need not say so.
    // Throws still::Error for an unknown name or value, or an absent input that is not optional.
    Op(OpSpec const& spec, std::map<std::string, AttributeValue> const& attributes, uint64_t absent_inputs);

    // A copy is not prepared: two contexts must not share persistent memory.
    Op(Op const& other) : Op(*other.mSpec, other.mAttributes, other.mAbsent) {}
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

    // What `infer` learns, for hosts whose kernels want the sizes; throws as it does.
    Call bind(std::vector<Tensor> const& inputs) const;

    // Bytes that any call with at most these sizes needs. Needs no GPU.
    size_t workspace_bytes(std::vector<Tensor> const& largest) const;

    // The launches for these shapes; loads their modules into the current context. Not for a stream under capture.
    Launches launches(std::vector<Tensor> const& inputs) const;

    // Evaluates the launches for these shapes, and keeps them with the memory that they need between calls.
    void prepare(std::vector<Tensor> const& inputs);

    // Loads into the current context every kernel that may serve this op, as far as attributes and `activation` (kNone: any)
    // tell; for hosts that learn the shapes only when they launch. Throws still::Error where no kernel can, saying what there is.
    void preload(Type activation) const;

    // True when prepare() was last called with these shapes.
    bool prepared(std::vector<Tensor> const& inputs) const { return mLaunches && mPrepared == inputs; }

    // Launches what was prepared; only launches, so it may be captured. Pointers in the order of inputs() and outputs().
    void launch(void const* const* inputs, void* const* outputs, void* workspace, void* stream) const;

private:
    OpSpec const* mSpec;
    std::map<std::string, AttributeValue> mAttributes;
    uint64_t mAbsent;
    std::shared_ptr<std::vector<TensorSpec> const> mOwn; // inputs, then outputs, as this op has them
    std::vector<TensorSpec const*> mInputs;
    std::vector<TensorSpec const*> mOutputs;
    std::vector<Tensor> mPrepared;
    std::shared_ptr<Launches const> mLaunches;
    std::shared_ptr<ZeroedMemory> mPersistent;
};

} // namespace still
