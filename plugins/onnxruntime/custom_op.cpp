// The ops of the domain "still" as custom ops of ONNX Runtime, for the CPU, in float32 and float16.
#include <cstdlib>
#include <cstring>
#include <deque>

#include "../cpu/common/instruction_sets.h"
#include "kernel.h"
#include "ort_api.h"

namespace
{

using namespace still_ort;

// A call of a node as the kernel sees it.
class OrtCall : public Call
{
public:
    OrtCall(still::OpSpec const& spec, bool half, OrtKernelContext* context, OrtMemoryInfo const* memory)
        : spec_(spec), half_(half), context_(context), memory_(memory), inputs_(spec.inputs.size())
    {
        shapes.resize(inputs_.size());
        size_t given;
        check(g_api->KernelContext_GetInputCount(context, &given));
        for (size_t i = 0; i < inputs_.size() && i < given; ++i)
        {
            check(g_api->KernelContext_GetInput(context, i, &inputs_[i]));
            if (inputs_[i])
                shapes[i] = shape_of(inputs_[i]);
        }
        host = {context, [](void* c, void (*task)(void*, size_t), size_t total, void* data)
            {
                // The status can only tell of a missing thread pool; the tasks are then run here.
                if (OrtStatus* const status = g_api->KernelContext_ParallelFor(static_cast<OrtKernelContext*>(c), task, total, 0, data))
                {
                    g_api->ReleaseStatus(status);
                    for (size_t i = 0; i < total; ++i)
                        task(data, i);
                }
            }};
    }

    void* input(size_t place) override { return inputs_[place] ? data_of(inputs_[place]) : nullptr; }

    void* output(size_t place, std::vector<int64_t> const& shape) override
    {
        OrtValue* value;
        check(g_api->KernelContext_GetOutput(context_, place, shape.data(), shape.size(), &value));
        return data_of(value);
    }

    void* state(size_t past) override
    {
        if (!inputs_[past])
            return nullptr;
        void* const from = input(past);
        // States come last, in the same order, among inputs and outputs.
        void* const to = output(spec_.outputs.size() - (spec_.inputs.size() - past), *shapes[past]);
        if (from != to)
        {
            size_t size = spec_.inputs[past].type == still::ElementType::kActivation && half_ ? 2 : 4;
            for (int64_t dim : *shapes[past])
                size *= static_cast<size_t>(dim);
            std::memcpy(to, from, size);
        }
        return to;
    }

    void* scratch(size_t size_bytes) override
    {
        scratch_.reset();
        scratch_ = std::make_unique<Memory>(context_, memory_, size_bytes);
        return scratch_->data;
    }

private:
    still::OpSpec const& spec_;
    bool half_;
    OrtKernelContext* context_;
    OrtMemoryInfo const* memory_;
    std::vector<OrtValue const*> inputs_;
    std::unique_ptr<Memory> scratch_;
};

// One node.
class Node
{
public:
    Node(still::OpSpec const& spec, Entry const& entry, OrtKernelInfo const* info, bool half)
        : spec_(spec), half_(half), kernel_(entry.make(NodeAttributes(info), half)), instruction_set_(chosen_set())
    {
        check(g_api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
    }
    Node(Node const&) = delete;
    Node& operator=(Node const&) = delete;
    ~Node() { g_api->ReleaseMemoryInfo(memory_); }

    void compute(OrtKernelContext* context)
    {
        OrtCall call(spec_, half_, context, memory_);
        call.instruction_set = instruction_set_;
        kernel_->compute(call);
    }

private:
    // STILL_CPU=baseline and the like choose a lesser instruction set, for tests.
    static int chosen_set()
    {
        char const* const asked = std::getenv("STILL_CPU");
        for (int i = 0; asked && i < still_cpu::count_instruction_sets(); ++i)
            if (std::strcmp(asked, still_cpu::instruction_set_name(i)) == 0)
                return i;
        if (asked && *asked)
            throw Refused(std::string("STILL_CPU=") + asked + " is unknown, or this processor cannot run it.");
        return 0;
    }

    still::OpSpec const& spec_;
    bool half_;
    std::unique_ptr<Kernel> kernel_;
    int instruction_set_;
    OrtMemoryInfo* memory_ = nullptr;
};

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
        { return guarded([&] { *kernel = new Node(self(op).spec, self(op).entry, info, self(op).half); }); };
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
                check(g_api->CreateCustomOpDomain(specs().front().domain.c_str(), &made));
                std::unique_ptr<OrtCustomOpDomain, void (*)(OrtCustomOpDomain*)> owner(made, g_api->ReleaseCustomOpDomain);
                for (Entry const& entry : kEntries)
                    for (still::OpSpec const& spec : specs())
                        for (bool const half : {false, true})
                            if (spec.name == entry.op)
                                check(g_api->CustomOpDomain_Add(made, &ops.emplace_back(spec, entry, half)));
                return owner;
            }();
            check(g_api->AddCustomOpDomain(options, domain.get()));
        });
}
