// The ops of the domain "still" as custom ops of ONNX Runtime: on CPUs in float32 and float16, and, if the library has GPU kernels, on the
// CUDA provider in float32, float16 and bfloat16.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>

#include "../core/archive.h"
#include "../core/driver.h"
#include "node.h"

namespace
{

using namespace still_ort;
using still::Type;

ONNXTensorElementDataType element_of(Type type)
{
    switch (type)
    {
    case Type::kFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case Type::kBFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case Type::kInt32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    default: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
}

// An op for one provider, one activation type, and one type of `narrow` states; `joined`: with joined states.
struct Op : OrtCustomOp
{
    still::OpSpec const& spec;
    Type activation;
    Type kept;
    still_cpu::Entry const* entry; // null for the CUDA provider
    bool joined;
    std::string name;
    std::vector<still::TensorSpec> inputs, outputs;

    Op(still::OpSpec const& op_spec, Type type, Type kept_type, still_cpu::Entry const* cpu, bool join)
        : OrtCustomOp{}, spec(op_spec), activation(type), kept(kept_type), entry(cpu), joined(join),
          name((join ? "Joined" : "") + op_spec.name), inputs(op_spec.inputs), outputs(op_spec.outputs)
    {
        if (joined)
            for (auto const& [tensors, side] : {std::pair{&inputs, "past_"}, std::pair{&outputs, "present_"}})
            {
                bool const narrow = std::any_of(tensors->begin(), tensors->end(), [](auto const& tensor) { return tensor.narrow; });
                tensors->resize(before_states(*tensors));
                tensors->push_back({side + std::string("first"), {}, still::ElementType::kActivation, false, true, false, narrow});
                tensors->push_back({side + std::string("second"), {}, still::ElementType::kFloat32, false, true, false});
            }
        version = kApiVersion;
        GetName = [](OrtCustomOp const* op) { return self(op).name.c_str(); };
        GetExecutionProviderType = [](OrtCustomOp const* op) -> char const*
        { return self(op).entry ? "CPUExecutionProvider" : "CUDAExecutionProvider"; };
        GetInputTypeCount = [](OrtCustomOp const* op) { return self(op).inputs.size(); };
        GetOutputTypeCount = [](OrtCustomOp const* op) { return self(op).outputs.size(); };
        GetInputType = [](OrtCustomOp const* op, size_t i) { return self(op).type(self(op).inputs[i]); };
        GetOutputType = [](OrtCustomOp const* op, size_t i) { return self(op).type(self(op).outputs[i]); };
        GetInputCharacteristic = [](OrtCustomOp const* op, size_t i) { return need(self(op).inputs[i]); };
        GetOutputCharacteristic = [](OrtCustomOp const* op, size_t i) { return need(self(op).outputs[i]); };
        // Counts are on the device, too: nothing is read back.
        GetInputMemoryType = [](OrtCustomOp const*, size_t) { return OrtMemTypeDefault; };
        GetVariadicInputMinArity = GetVariadicInputHomogeneity = [](OrtCustomOp const*) { return 0; };
        GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = [](OrtCustomOp const*) { return 0; };
        GetStartVersion = GetEndVersion = [](OrtCustomOp const* op) { return self(op).spec.version; };
        CreateKernelV2 = [](OrtCustomOp const* op, OrtApi const*, OrtKernelInfo const* info, void** kernel)
        { return guarded([&] { *kernel = self(op).make(info).release(); }); };
        KernelComputeV2 = [](void* kernel, OrtKernelContext* context)
        { return guarded([&] { static_cast<Node*>(kernel)->compute(context); }); };
        KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
        InferOutputShapeFn = [](OrtCustomOp const* op, OrtShapeInferContext* context)
        { return guarded([&] { self(op).infer(context); }); };
    }

    static Op const& self(OrtCustomOp const* op) { return *static_cast<Op const*>(op); }

    std::unique_ptr<Node> make(OrtKernelInfo const* info) const
    {
        return entry ? make_cpu_node(*entry, spec, info, activation == Type::kFloat16, joined) : make_cuda_node(spec, info, activation);
    }

    ONNXTensorElementDataType type(still::TensorSpec const& tensor) const
    {
        switch (tensor.type)
        {
        case still::ElementType::kFloat32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        case still::ElementType::kInteger: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
        case still::ElementType::kInt32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
        default: return element_of(tensor.narrow ? kept : activation);
        }
    }

    static OrtCustomOpInputOutputCharacteristic need(still::TensorSpec const& tensor)
    {
        return tensor.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    }

    // Each output has the shape of the first input with the same symbols; joined states have that of their past.
    void infer(OrtShapeInferContext* context) const
    {
        size_t given;
        check(g_api->ShapeInferContext_GetInputCount(context, &given));
        for (size_t i = 0; i < outputs.size(); ++i)
        {
            size_t source = 0;
            while (source < inputs.size() && (inputs[source].shape != outputs[i].shape || inputs[source].type != outputs[i].type))
                ++source;
            if (outputs[i].optional || source >= given)
                continue;                    // may be absent
            OrtTensorTypeAndShapeInfo* info; // owned by the context
            check(g_api->ShapeInferContext_GetInputTypeShape(context, source, &info));
            check(g_api->ShapeInferContext_SetOutputTypeShape(context, i, info));
        }
    }
};

// Whether a node may have its states joined in two tensors; ops with states of one type need no joining.
bool states_of_both_types(still::OpSpec const& spec)
{
    auto const has = [&](still::ElementType type)
    { return std::any_of(spec.inputs.begin(), spec.inputs.end(), [=](auto const& tensor) { return tensor.state && tensor.type == type; }); };
    return has(still::ElementType::kActivation) && has(still::ElementType::kFloat32);
}

bool has_narrow(still::OpSpec const& spec)
{
    return std::any_of(spec.inputs.begin(), spec.inputs.end(), [](auto const& tensor) { return tensor.narrow; });
}

using Domain = std::unique_ptr<OrtCustomOpDomain, void (*)(OrtCustomOpDomain*)>;

// The domain with every op, or with those that have CPU kernels if `cpu_alone`; `ops` must not move while the domain is in use.
Domain make_domain(std::deque<Op>& ops, bool cpu_alone)
{
    OrtCustomOpDomain* made;
    check(g_api->CreateCustomOpDomain(still::op_specs().front().domain.c_str(), &made));
    Domain owner(made, g_api->ReleaseCustomOpDomain);
    for (still_cpu::Entry const& entry : still_cpu::entries())
    {
        still::OpSpec const& spec = still::op_spec(entry.op);
        for (bool const joined : {false, true})
        {
            if (joined && !states_of_both_types(spec))
                continue;
            for (Type const type : {Type::kFloat32, Type::kFloat16})
                ops.emplace_back(spec, type, type, &entry, joined);
            if (has_narrow(spec))
                for (Type const kept : {Type::kFloat16, Type::kInt32})
                    ops.emplace_back(spec, Type::kFloat32, kept, &entry, joined);
        }
    }
    // Every type, if there are kernels at all: an unsupported one is then refused by name instead of silently running on CPUs.
    for (still::OpSpec const& spec : still::op_specs())
        if (!cpu_alone && still::Archive::get().plan(spec.name, spec.version))
            for (Type const type : {Type::kFloat32, Type::kFloat16, Type::kBFloat16})
            {
                ops.emplace_back(spec, type, type, nullptr, false);
                if (has_narrow(spec))
                    ops.emplace_back(spec, type, Type::kInt32, nullptr, false);
            }
    for (Op const& op : ops)
        check(g_api->CustomOpDomain_Add(made, &op));
    return owner;
}

bool has_driver()
{
    try
    {
        still::Driver::get();
        return true;
    }
    catch (still::Error const&)
    {
        return false;
    }
}

// Whether a session has only the CPU provider: by the host's option, or because there is no driver. ONNX Runtime runs a node's function
// body if no provider has an op of that name. A node whose op is registered only for the CUDA provider does not load without that provider.
bool for_cpu(OrtSessionOptions const* options)
{
    constexpr char kProvider[] = "still.provider";
    int there = 0;
    check(g_api->HasSessionConfigEntry(options, kProvider, &there));
    if (!there)
        return !has_driver();
    size_t size = 0; // with the NUL at the end
    check(g_api->GetSessionConfigEntry(options, kProvider, nullptr, &size));
    std::string value(size, '\0');
    check(g_api->GetSessionConfigEntry(options, kProvider, value.data(), &size));
    return std::string(value.c_str()) == "cpu";
}

// Whether this ONNX Runtime is supported: older ones serve the API, and 1.23 crashes with SIGSEGV in these ops.
bool new_enough(char const* version)
{
    int major = 0, minor = 0;
    return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || (major == 1 && minor >= kLeastMinor));
}

} // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(
    OrtSessionOptions* options, OrtApiBase const* base)
{
    char const* const version = base->GetVersionString();
    g_api = base->GetApi(kApiVersion);
    if (!g_api || !new_enough(version))
    {
        std::string const said = "ONNX Runtime " + std::string(version) + " is too old: this library needs 1."
            + std::to_string(kLeastMinor) + " or later";
        return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, said.c_str());
    }
    return guarded(
        [&]
        {
            static std::deque<Op> ops[2]; // live as long as the process
            static Domain const all = make_domain(ops[0], false), cpu = make_domain(ops[1], true);
            check(g_api->AddCustomOpDomain(options, (for_cpu(options) ? cpu : all).get()));
        });
}
