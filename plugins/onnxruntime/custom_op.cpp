// The ops of the domain "still" as custom ops of ONNX Runtime, for the CPU, in float32 and float16.
#include <deque>
#include <memory>

#include "node.h"

namespace
{

using namespace still_ort;
using still_cpu::Entry;

// An op for one type of activations.
struct Op : OrtCustomOp
{
    still::OpSpec const& spec;
    Entry const& entry;
    bool half;

    Op(still::OpSpec const& op_spec, Entry const& of, bool is_half) : OrtCustomOp{}, spec(op_spec), entry(of), half(is_half)
    {
        version = kApiVersion;
        GetName = [](OrtCustomOp const* op) { return self(op).spec.name.c_str(); };
        GetExecutionProviderType = [](OrtCustomOp const*) -> char const* { return "CPUExecutionProvider"; };
        GetInputTypeCount = [](OrtCustomOp const* op) { return self(op).spec.inputs.size(); };
        GetOutputTypeCount = [](OrtCustomOp const* op) { return self(op).spec.outputs.size(); };
        GetInputType = [](OrtCustomOp const* op, size_t i) { return self(op).type(self(op).spec.inputs[i]); };
        GetOutputType = [](OrtCustomOp const* op, size_t i) { return self(op).type(self(op).spec.outputs[i]); };
        GetInputCharacteristic = [](OrtCustomOp const* op, size_t i) { return need(self(op).spec.inputs[i]); };
        GetOutputCharacteristic = [](OrtCustomOp const* op, size_t i) { return need(self(op).spec.outputs[i]); };
        GetInputMemoryType = [](OrtCustomOp const*, size_t) { return OrtMemTypeDefault; };
        GetVariadicInputMinArity = GetVariadicInputHomogeneity = [](OrtCustomOp const*) { return 0; };
        GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = [](OrtCustomOp const*) { return 0; };
        GetStartVersion = GetEndVersion = [](OrtCustomOp const* op) { return self(op).spec.version; };
        CreateKernelV2 = [](OrtCustomOp const* op, OrtApi const*, OrtKernelInfo const* info, void** kernel)
        { return guarded([&] { *kernel = make_cpu_node(self(op).spec, self(op).entry, info, self(op).half).release(); }); };
        KernelComputeV2 = [](void* kernel, OrtKernelContext* context)
        { return guarded([&] { static_cast<Node*>(kernel)->compute(context); }); };
        KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
        InferOutputShapeFn = [](OrtCustomOp const* op, OrtShapeInferContext* context)
        { return guarded([&] { self(op).infer(context); }); };
    }

    static Op const& self(OrtCustomOp const* op) { return *static_cast<Op const*>(op); }

    ONNXTensorElementDataType type(still::TensorSpec const& tensor) const
    {
        switch (tensor.type)
        {
        case still::ElementType::kFloat32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        case still::ElementType::kInteger: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
        default: return half ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        }
    }

    static OrtCustomOpInputOutputCharacteristic need(still::TensorSpec const& tensor)
    {
        return tensor.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    }

    // Each output is shaped as the first input with the same symbols.
    void infer(OrtShapeInferContext* context) const
    {
        size_t given;
        check(g_api->ShapeInferContext_GetInputCount(context, &given));
        for (size_t i = 0; i < spec.outputs.size(); ++i)
        {
            size_t source = 0;
            while (source < spec.inputs.size() && spec.inputs[source].shape != spec.outputs[i].shape)
                ++source;
            if (spec.outputs[i].optional || source >= given)
                continue;                    // may be absent
            OrtTensorTypeAndShapeInfo* info; // stays the context's
            check(g_api->ShapeInferContext_GetInputTypeShape(context, source, &info));
            check(g_api->ShapeInferContext_SetOutputTypeShape(context, i, info));
        }
    }
};

} // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(
    OrtSessionOptions* options, OrtApiBase const* base)
{
    g_api = base->GetApi(kApiVersion);
    if (!g_api)
        return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, "this library needs ONNX Runtime 1.18 or later");
    return guarded(
        [&]
        {
            static std::deque<Op> ops; // must stay where they are
            static std::unique_ptr<OrtCustomOpDomain, void (*)(OrtCustomOpDomain*)> const domain = []
            {
                OrtCustomOpDomain* made;
                check(g_api->CreateCustomOpDomain(still::op_specs().front().domain.c_str(), &made));
                std::unique_ptr<OrtCustomOpDomain, void (*)(OrtCustomOpDomain*)> owner(made, g_api->ReleaseCustomOpDomain);
                for (Entry const& entry : still_cpu::entries())
                    for (bool const half : {false, true})
                        check(g_api->CustomOpDomain_Add(made, &ops.emplace_back(still::op_spec(entry.op), entry, half)));
                return owner;
            }();
            check(g_api->AddCustomOpDomain(options, domain.get()));
        });
}
