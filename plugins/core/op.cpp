#include "op.h"

#include "error.h"
#include "generated/op_specs.h"
#include "plan.h"

#include <algorithm>
#include <cctype>

namespace still
{
namespace
{

constexpr char kStarts[] = "B+1";

struct Dimension // factor * symbol + offset
{
    int64_t factor{1};
    std::string symbol; // empty: a number, which is `factor`
    int64_t offset{};

    int64_t of(int64_t size) const { return factor * size + offset; }
};

Dimension parse_dimension(std::string const& text)
{
    if (text == kStarts)
        return {1, "B", 1};
    size_t digits = 0;
    while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits])))
        ++digits;
    int64_t const factor = digits ? std::stoll(text.substr(0, digits)) : 1;
    return {factor, text.substr(digits < text.size() && text[digits] == '*' ? digits + 1 : digits), 0};
}

std::string expected_shape(TensorSpec const& spec, std::map<std::string, int64_t> const& sizes)
{
    std::string text;
    for (std::string const& name : spec.shape)
    {
        Dimension const dim = parse_dimension(name);
        auto const known = sizes.find(dim.symbol);
        text += (text.empty() ? "" : ", ") + name;
        if (known != sizes.end())
            text += "=" + std::to_string(dim.of(known->second));
    }
    return "[" + text + "]";
}

// Reads the sizes of one tensor into `sizes`, or compares them.
void bind_shape(std::string const& op, TensorSpec const& spec, Tensor const& tensor, std::map<std::string, int64_t>& sizes)
{
    std::map<std::string, int64_t> const before = sizes; // for messages: what other tensors said
    auto const refuse = [&](char const* why) {
        fail(op, ": ", spec.name, ": expected ", expected_shape(spec, before), ", got ", tensor.shape(), why, ".");
    };
    if (tensor.rank != static_cast<int32_t>(spec.shape.size()))
        refuse("");
    for (int axis = 0; axis < tensor.rank; ++axis)
    {
        Dimension const dim = parse_dimension(spec.shape[static_cast<size_t>(axis)]);
        int64_t const size = tensor.dims[axis];
        if (size < 0)
            refuse("; a dimension is still unknown");
        if (dim.symbol.empty())
        {
            if (size != dim.factor)
                refuse("");
            continue;
        }
        auto const known = sizes.find(dim.symbol);
        if (known == sizes.end())
        {
            if (size < dim.offset || (size - dim.offset) % dim.factor != 0)
                refuse("");
            sizes[dim.symbol] = (size - dim.offset) / dim.factor;
        }
        else if (size != dim.of(known->second) && !(spec.weight && size == 1))
            refuse("");
    }
}

Type concrete(ElementType type, Call const& call)
{
    switch (type)
    {
    case ElementType::kActivation: return call.activation;
    case ElementType::kFloat32: return Type::kFloat32;
    case ElementType::kInteger: return call.count;
    }
    return Type::kNone;
}

std::string names(std::vector<std::string> const& values)
{
    std::string text;
    for (auto const& value : values)
        text += (text.empty() ? "" : ", ") + value;
    return text;
}

std::string partner(std::string const& present)
{
    return "past_" + state_name(present);
}

// A tensor of padded rows as packed ones have it.
TensorSpec packed(TensorSpec tensor)
{
    bool const activation = tensor.shape.size() > 1 && tensor.shape[0] == "B" && tensor.shape[1] == "T";
    if (activation)
        tensor.shape.erase(tensor.shape.begin());
    if (activation)
        tensor.shape[0] = "tokens";
    else if (!tensor.shape.empty() && tensor.shape[0] == "B")
        tensor.shape[0] = "rows";
    return tensor;
}

// Counts of new tokens follow from query_start.
bool counts_tokens(TensorSpec const& input)
{
    return input.type == ElementType::kInteger && input.name.rfind("past_", 0) != 0;
}

// What a host needs of a plan that is not there, in the words of the archive.
Plan const& plan_of(OpSpec const& spec)
{
    Plan const* const plan = Archive::get().plan(spec.name, spec.version);
    if (!plan)
        Archive::get().all(spec.name, spec.version, {}); // says what there is
    return *plan;
}

} // namespace

char const* type_name(Type type)
{
    switch (type)
    {
    case Type::kFloat32: return "float32";
    case Type::kFloat16: return "float16";
    case Type::kBFloat16: return "bfloat16";
    case Type::kInt32: return "int32";
    case Type::kInt64: return "int64";
    case Type::kNone: break;
    }
    return "nothing";
}

size_t type_bytes(Type type)
{
    switch (type)
    {
    case Type::kFloat16:
    case Type::kBFloat16: return 2;
    case Type::kFloat32:
    case Type::kInt32: return 4;
    case Type::kInt64: return 8;
    case Type::kNone: break;
    }
    return 0;
}

bool Tensor::operator==(Tensor const& other) const
{
    return type == other.type && rank == other.rank && std::equal(dims, dims + rank, other.dims);
}

std::string Tensor::shape() const
{
    std::string text;
    for (int axis = 0; axis < rank; ++axis)
        text += (axis ? ", " : "") + std::to_string(dims[axis]);
    return "[" + text + "]";
}

size_t Tensor::bytes() const
{
    size_t count = type_bytes(type);
    for (int axis = 0; axis < rank; ++axis)
        count *= static_cast<size_t>(dims[axis]);
    return count;
}

int64_t Call::size(std::string const& symbol) const
{
    Dimension const dim = parse_dimension(symbol);
    return dim.of(sizes.at(dim.symbol));
}

int64_t Call::integer(std::string const& attribute) const { return attributes->at(attribute).integer; }
double Call::real(std::string const& attribute) const { return attributes->at(attribute).real; }
std::string const& Call::text(std::string const& attribute) const { return attributes->at(attribute).text; }
Tensor const& Call::tensor(std::string const& name) const { return tensors.at(name); }
void Call::refuse(std::string const& what) const { fail(spec->name, ": ", what); }

std::vector<OpSpec> const& op_specs()
{
    static auto const* const specs = new std::vector<OpSpec>(make_op_specs());
    return *specs;
}

OpSpec const& op_spec(std::string const& name)
{
    std::vector<std::string> known;
    for (OpSpec const& spec : op_specs())
    {
        if (spec.name == name)
            return spec;
        known.push_back(spec.name);
    }
    fail("unknown op ", name, "; this library has ", names(known), ".");
}

Op::Op(OpSpec const& spec, std::map<std::string, AttributeValue> const& attributes, uint64_t absent_inputs, Rows rows)
    : mSpec(&spec), mAbsent(absent_inputs), mRows(rows)
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
            fail(spec.name, ": attribute ", name, "=\"", value.text, "\" is unknown; known: ", names(known->choices), ".");
        mAttributes[name] = value;
    }
    if (spec.inputs.size() < 64 && absent_inputs >> spec.inputs.size())
        fail(spec.name, ": absent_inputs=", absent_inputs, " names inputs beyond the ", spec.inputs.size(), " of the op.");
    auto tensors = std::make_shared<std::vector<TensorSpec>>();
    if (rows == Rows::kPacked)
    {
        for (auto const* all : {&spec.inputs, &spec.outputs})
            for (TensorSpec const& tensor : *all)
                tensors->push_back(packed(tensor));
        tensors->push_back({kQueryStart, {kStarts}, ElementType::kInteger, false, false, false});
        tensors->push_back({kStateRow, {"B"}, ElementType::kInteger, false, false, false});
        tensors->push_back({kMaxTokens, {"T"}, ElementType::kInteger, false, false, false});
    }
    mPacked = tensors;
    auto const of = [&](TensorSpec const* first, size_t i) { return rows == Rows::kPacked ? &(*tensors)[i] : first; };
    std::vector<std::string> absent;
    for (size_t i = 0; i < spec.inputs.size(); ++i)
    {
        TensorSpec const& tensor = spec.inputs[i];
        if (rows == Rows::kPacked && counts_tokens(tensor))
            continue;
        if (!(absent_inputs >> i & 1))
            mInputs.push_back(of(&tensor, i));
        else if (tensor.optional)
            absent.push_back(tensor.name);
        else
            fail(spec.name, ": ", tensor.name, " is not optional, but absent_inputs=", absent_inputs, " leaves it out.");
    }
    for (size_t i = spec.inputs.size() + spec.outputs.size(); i < tensors->size(); ++i)
        mInputs.push_back(&(*tensors)[i]);
    for (size_t i = 0; i < spec.outputs.size(); ++i)
    {
        TensorSpec const& tensor = spec.outputs[i];
        if (!tensor.state || std::find(absent.begin(), absent.end(), partner(tensor.name)) == absent.end())
            mOutputs.push_back(of(&tensor, spec.inputs.size() + i));
    }
}

Call Op::bind(std::vector<Tensor> const& inputs) const
{
    if (inputs.size() != mInputs.size())
        fail(mSpec->name, ": expected ", mInputs.size(), " inputs, got ", inputs.size(), ".");
    Call call;
    call.spec = mSpec;
    call.attributes = &mAttributes;
    call.inputs = &mInputs;
    call.outputs = &mOutputs;
    call.packed = mRows == Rows::kPacked;
    // Weights last: their dimension of 1 must not become the size of a symbol.
    for (bool const weights : {false, true})
    {
        for (size_t i = 0; i < inputs.size(); ++i)
        {
            TensorSpec const& spec = *mInputs[i];
            if (spec.weight != weights)
                continue;
            Tensor const& tensor = inputs[i];
            if (spec.type == ElementType::kActivation && call.activation == Type::kNone)
            {
                if (tensor.type != Type::kFloat32 && tensor.type != Type::kFloat16 && tensor.type != Type::kBFloat16)
                    fail(mSpec->name, ": ", spec.name, ": expected float16, bfloat16 or float32, got ", type_name(tensor.type), ".");
                call.activation = tensor.type;
            }
            if (spec.type == ElementType::kInteger && call.count == Type::kNone)
            {
                if (tensor.type != Type::kInt32 && tensor.type != Type::kInt64)
                    fail(mSpec->name, ": ", spec.name, ": expected int32 or int64, got ", type_name(tensor.type), ".");
                call.count = tensor.type;
            }
            if (Type const expected = concrete(spec.type, call); tensor.type != expected)
                fail(mSpec->name, ": ", spec.name, ": expected ", type_name(expected), ", got ", type_name(tensor.type), ".");
            bind_shape(mSpec->name, spec, tensor, call.sizes);
            call.tensors[spec.name] = tensor;
        }
    }
    if (!call.packed && call.knows("B") && call.knows("T"))
    {
        call.sizes["rows"] = call.size("B");
        if (__builtin_mul_overflow(call.size("B"), call.size("T"), &call.sizes["tokens"]))
            fail(mSpec->name, ": B=", call.size("B"), " times T=", call.size("T"), " tokens are more than 64 bits count.");
    }
    else if (call.packed && call.knows("rows") && call.size("B") > call.size("rows"))
        fail(mSpec->name, ": ", kStateRow, " has ", call.size("B"), " rows, the state ", call.size("rows"), ".");
    for (TensorSpec const* spec : mOutputs)
    {
        Tensor tensor;
        tensor.type = concrete(spec->type, call);
        tensor.rank = static_cast<int32_t>(spec->shape.size());
        for (int axis = 0; axis < tensor.rank; ++axis)
            tensor.dims[axis] = call.size(spec->shape[static_cast<size_t>(axis)]);
        call.tensors[spec->name] = tensor;
    }
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
    call.packed = mRows == Rows::kPacked;
    Plan const* const plan = Archive::get().plan(mSpec->name, mSpec->version);
    if (!plan)
        return; // no kernels
    Key const part = plan->key(call);
    int const architecture = current_architecture();
    for (Variant const& variant : Archive::get().variants())
    {
        bool const fits = std::all_of(part.begin(), part.end(), [&](auto const& item) {
            auto const found = variant.key.find(item.first);
            return found != variant.key.end() && found->second == item.second;
        });
        if (fits && variant.op == mSpec->name && variant.op_version == mSpec->version && runs_on(variant.architecture, architecture))
            for (auto const& [name, kernel] : variant.kernels)
                load_function(kernel);
    }
}

void Op::prepare(std::vector<Tensor> const& inputs)
{
    Call const call = bind(inputs);
    Plan const& plan = plan_of(*mSpec);
    plan.check(call);
    Variant const& variant = Archive::get().find(mSpec->name, mSpec->version, current_architecture(), plan.key(call));
    auto launches = std::make_shared<Launches>(plan.launches(call, variant));
    if (launches->persistent_bytes > (mPersistent ? mPersistent->bytes() : 0))
        mPersistent = std::make_shared<ZeroedMemory>(launches->persistent_bytes);
    mLaunches = std::move(launches);
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
