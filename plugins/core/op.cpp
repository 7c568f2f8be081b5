#include "op.h"

#include "error.h"
#include "plan.h"

#include <algorithm>
#include <string>

namespace still
{
namespace
{

std::string partner(std::string const& present)
{
    return "past_" + state_name(present);
}

// 8-bit rows are words of four codes, with scales.
constexpr char kInCodes[] = "int8";

TensorSpec in_codes(TensorSpec tensor)
{
    if (tensor.narrow)
    {
        tensor.shape.back() += kWords;
        tensor.type = ElementType::kInt32;
        tensor.narrow = false;
    }
    return tensor;
}

// Throws if a state has another type than the activations; plans' kernels require equal types.
void demand_alike(Call const& call)
{
    if (call.kept != Type::kNone && call.kept != call.activation)
        call.refuse(std::string("states are ") + type_name(call.kept) + ", activations " + type_name(call.activation)
                    + "; GPU kernels need equal types. Export without --cache.");
}

// The op's plan; throws if the archive has none.
Plan const& plan_of(OpSpec const& spec)
{
    Plan const* const plan = Archive::get().plan(spec.name, spec.version);
    if (!plan)
        Archive::get().all(spec.name, spec.version, {}); // throws with a list of what exists
    return *plan;
}

} // namespace

OpSpec const& op_spec(std::string const& name)
{
    std::vector<std::string> known;
    for (OpSpec const& spec : op_specs())
    {
        if (spec.name == name)
            return spec;
        known.push_back(spec.name);
    }
    fail("unknown op ", name, "; this library has ", joined(known), ".");
}

Op::Op(OpSpec const& spec, std::map<std::string, AttributeValue> const& attributes, uint64_t absent_inputs)
    : mSpec(&spec), mAbsent(absent_inputs)
{
    for (AttributeSpec const& attribute : spec.attributes)
        mAttributes[attribute.name] = {attribute.kind, attribute.integer, attribute.real, attribute.text};
    for (auto const& [name, value] : attributes)
    {
        auto const known = std::find_if(
            spec.attributes.begin(), spec.attributes.end(), [&name = name](AttributeSpec const& a) { return a.name == name; });
        if (known == spec.attributes.end())
            fail(spec.name, ": unknown attribute ", name, ".");
        if (known->kind != value.kind)
            fail(spec.name, ": attribute ", name, " has the wrong type.");
        if (!known->choices.empty() && std::find(known->choices.begin(), known->choices.end(), value.text) == known->choices.end())
            fail(spec.name, ": attribute ", name, "=\"", value.text, "\" is unknown; known: ", joined(known->choices), ".");
        mAttributes[name] = value;
    }
    if (spec.inputs.size() < 64 && absent_inputs >> spec.inputs.size())
        fail(spec.name, ": absent_inputs=", absent_inputs, " names inputs beyond the ", spec.inputs.size(), " of the op.");
    auto tensors = std::make_shared<std::vector<TensorSpec>>();
    auto const cache = mAttributes.find(kCache);
    bool const codes = cache != mAttributes.end() && cache->second.text == kInCodes;
    for (auto const* all : {&spec.inputs, &spec.outputs})
        for (TensorSpec const& given : *all)
            tensors->push_back(codes ? in_codes(given) : given);
    mOwn = tensors;
    auto const of = [&](size_t i) { return &(*tensors)[i]; };
    std::vector<std::string> absent;
    for (size_t i = 0; i < spec.inputs.size(); ++i)
    {
        TensorSpec const& tensor = spec.inputs[i];
        if (tensor.of_codes && !codes)
            mAbsent |= uint64_t{1} << i;
        if (!(mAbsent >> i & 1))
            mInputs.push_back(of(i));
        else if (tensor.optional)
            absent.push_back(tensor.name);
        else
            fail(spec.name, ": ", tensor.name, " is not optional, but absent_inputs=", absent_inputs, " leaves it out.");
    }
    auto const none = [&](std::string const& dim) { // a size that an attribute sets to 0
        auto const known = mAttributes.find(dim);
        return known != mAttributes.end() && known->second.integer == 0;
    };
    for (size_t i = 0; i < spec.outputs.size(); ++i)
    {
        TensorSpec const& tensor = spec.outputs[i];
        if (!tensor.state && tensor.optional && std::any_of(tensor.shape.begin(), tensor.shape.end(), none))
            continue;
        if (!tensor.state || std::find(absent.begin(), absent.end(), partner(tensor.name)) == absent.end())
            mOutputs.push_back(of(spec.inputs.size() + i));
    }
}

Call Op::bind(std::vector<Tensor> const& inputs) const
{
    Call call;
    call.spec = mSpec;
    call.attributes = &mAttributes;
    call.inputs = &mInputs;
    call.outputs = &mOutputs;
    call.bind(inputs);
    return call;
}

std::vector<Tensor> Op::infer(std::vector<Tensor> const& inputs) const
{
    Call const call = bind(inputs);
    if (Plan const* const plan = Archive::get().plan(mSpec->name, mSpec->version))
        plan->check(call);
    std::vector<Tensor> outputs;
    for (TensorSpec const* spec : mOutputs)
        outputs.push_back(call.tensor(spec->name));
    return outputs;
}

size_t Op::workspace_bytes(std::vector<Tensor> const& largest) const
{
    Call const call = bind(largest);
    demand_alike(call);
    Plan const& plan = plan_of(*mSpec);
    plan.check(call);
    size_t bytes = 0;
    for (Variant const* variant : Archive::get().all(mSpec->name, mSpec->version, plan.key(call)))
        bytes = std::max(bytes, plan.workspace_bytes(call, *variant));
    return bytes;
}

void Op::preload(Type activation) const
{
    Call call;
    call.spec = mSpec;
    call.attributes = &mAttributes;
    call.activation = activation;
    for (TensorSpec const* spec : mInputs)
        call.tensors[spec->name] = {};
    call.take_attributes();
    Key const part = plan_of(*mSpec).key(call);
    int const architecture = current_architecture();
    Archive::get().find(mSpec->name, mSpec->version, architecture, part); // throws if there is none
    for (Variant const* variant : Archive::get().all(mSpec->name, mSpec->version, part))
        if (runs_on(variant->architecture, architecture))
            for (auto const& [name, kernel] : variant->kernels)
                load_function(kernel);
}

Launches Op::launches(std::vector<Tensor> const& inputs) const
{
    Call const call = bind(inputs);
    demand_alike(call);
    Plan const& plan = plan_of(*mSpec);
    plan.check(call);
    Variant const& variant = Archive::get().find(mSpec->name, mSpec->version, current_architecture(), plan.key(call));
    return plan.launches(call, variant);
}

void Op::prepare(std::vector<Tensor> const& inputs)
{
    auto made = std::make_shared<Launches>(launches(inputs));
    if (made->persistent_bytes > (mPersistent ? mPersistent->bytes() : 0))
        mPersistent = std::make_shared<ZeroedMemory>(made->persistent_bytes);
    mLaunches = std::move(made);
    mPrepared = inputs;
}

void Op::launch(void const* const* inputs, void* const* outputs, void* workspace, void* stream) const
{
    if (!mLaunches)
        fail(mSpec->name, ": launched before it was prepared for its shapes.");
    if (mLaunches->workspace_bytes && !workspace)
        fail(mSpec->name, ": needs ", mLaunches->workspace_bytes, " bytes of workspace, got none.");
    run(*mLaunches, inputs, outputs, workspace, mPersistent ? mPersistent->address() : 0, stream);
}

} // namespace still
