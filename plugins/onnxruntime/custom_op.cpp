// still::HybridAttention as a custom op of ONNX Runtime, for the CPU, in float32 and float16.
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "op_schema.h"
#include "ort_api.h"

namespace
{

using namespace still_cpu;
using namespace still_ort;

// One node.
class Kernel
{
public:
    Kernel(OrtKernelInfo const* info, bool half) : layer_(read_attributes(NodeAttributes(info), half)), instruction_set_(chosen_set())
    {
        check(g_api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
    }
    Kernel(Kernel const&) = delete;
    Kernel& operator=(Kernel const&) = delete;
    ~Kernel() { g_api->ReleaseMemoryInfo(memory_); }

    void compute(OrtKernelContext* context)
    {
        std::array<OrtValue const*, kInputs> inputs{};
        Shapes shapes(kInputs);
        size_t given;
        check(g_api->KernelContext_GetInputCount(context, &given));
        for (size_t i = 0; i < kInputs && i < given; ++i)
        {
            check(g_api->KernelContext_GetInput(context, i, &inputs[i]));
            if (inputs[i])
                shapes[i] = shape_of(inputs[i]);
        }
        Sizes const sizes = sizes_of(shapes);
        int64_t const* const brought = static_cast<int64_t const*>(data_of(inputs[kNewTokens]));
        int64_t const* const past = static_cast<int64_t const*>(data_of(inputs[kPastLength]));
        check_counts(sizes, past, brought);

        auto const input = [&](int i) -> void*
        { return inputs[static_cast<size_t>(i)] ? data_of(inputs[static_cast<size_t>(i)]) : nullptr; };
        auto const output = [&](size_t i, std::vector<int64_t> const& shape)
        {
            OrtValue* value;
            check(g_api->KernelContext_GetOutput(context, i, shape.data(), shape.size(), &value));
            if (!value)
                throw Refused("still::HybridAttention: the node leaves out its output " + op_spec().outputs[i].name + ".");
            return data_of(value);
        };
        // Works in place: where the host keeps past and present apart, present starts as a copy.
        auto const state = [&](int past_input) -> void*
        {
            if (!inputs[static_cast<size_t>(past_input)])
                return nullptr;
            std::vector<int64_t> const& shape = *shapes[static_cast<size_t>(past_input)];
            void* const from = input(past_input);
            void* const to = output(static_cast<size_t>(1 + past_input - kPastWindowKey), shape);
            if (from != to)
            {
                bool const wide = op_spec().inputs[static_cast<size_t>(past_input)].type == still::ElementType::kFloat32;
                size_t size = wide ? 4 : static_cast<size_t>(layer_.element_size());
                for (int64_t dim : shape)
                    size *= static_cast<size_t>(dim);
                std::memcpy(to, from, size);
            }
            return to;
        };
        Tensors x{};
        x.query = input(kQuery), x.key = input(kKey), x.value = input(kValue), x.gate = input(kGate);
        x.feature_q_weight = input(kFeatureQWeight), x.feature_k_weight = input(kFeatureKWeight);
        x.window_factor = static_cast<float const*>(input(kWindowFactor));
        x.output = output(0, *shapes[kQuery]);
        x.window_key = state(kPastWindowKey), x.window_value = state(kPastWindowValue);
        x.window_score = static_cast<float*>(state(kPastWindowScore));
        x.salient_key = state(kPastSalientKey), x.salient_value = state(kPastSalientValue);
        x.salient_score = static_cast<float*>(state(kPastSalientScore));
        x.kv_state = static_cast<float*>(state(kPastKvState)), x.z_state = static_cast<float*>(state(kPastZState));
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        Memory const scratch(context, memory_, scratch_size(sizes.layer, sizes.batch, sizes.tokens));
        Host const host{context, [](void* c, void (*task)(void*, size_t), size_t total, void* data)
            {
                // The status can only tell of a missing thread pool; the tasks are then run here.
                if (OrtStatus* const status = g_api->KernelContext_ParallelFor(static_cast<OrtKernelContext*>(c), task, total, 0, data))
                {
                    g_api->ReleaseStatus(status);
                    for (size_t i = 0; i < total; ++i)
                        task(data, i);
                }
            }};
        hybrid_attention(sizes.layer, x, sizes.batch, past, brought, scratch.data, host, instruction_set_);
    }

private:
    // Of the latest call, as steps are alike; a session may be run from several threads.
    Sizes sizes_of(Shapes const& shapes)
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (shapes != known_)
        {
            sizes_ = read_shapes(layer_, shapes);
            known_ = shapes;
        }
        return sizes_;
    }

    // STILL_CPU=baseline and the like choose a lesser instruction set, for tests.
    static int chosen_set()
    {
        char const* const asked = std::getenv("STILL_CPU");
        for (int i = 0; asked && i < count_instruction_sets(); ++i)
            if (std::strcmp(asked, instruction_set_name(i)) == 0)
                return i;
        if (asked && *asked)
            throw Refused(std::string("STILL_CPU=") + asked + " is unknown, or this processor cannot run it.");
        return 0;
    }

    Layer layer_;
    int instruction_set_;
    OrtMemoryInfo* memory_ = nullptr;
    std::mutex mutex_;
    Shapes known_;
    Sizes sizes_{};
};

// The op for one type of activations.
struct Op : OrtCustomOp
{
    bool half;

    explicit Op(bool is_half) : OrtCustomOp{}, half(is_half)
    {
        version = kApiVersion;
        GetName = [](OrtCustomOp const*) { return op_spec().name.c_str(); };
        GetExecutionProviderType = [](OrtCustomOp const*) -> char const* { return "CPUExecutionProvider"; };
        GetInputTypeCount = [](OrtCustomOp const*) { return op_spec().inputs.size(); };
        GetOutputTypeCount = [](OrtCustomOp const*) { return op_spec().outputs.size(); };
        GetInputType = [](OrtCustomOp const* op, size_t i) { return type(op, op_spec().inputs[i]); };
        GetOutputType = [](OrtCustomOp const* op, size_t i) { return type(op, op_spec().outputs[i]); };
        GetInputCharacteristic = [](OrtCustomOp const*, size_t i) { return need(op_spec().inputs[i]); };
        GetOutputCharacteristic = [](OrtCustomOp const*, size_t i) { return need(op_spec().outputs[i]); };
        GetInputMemoryType = [](OrtCustomOp const*, size_t) { return OrtMemTypeDefault; };
        GetVariadicInputMinArity = GetVariadicInputHomogeneity = [](OrtCustomOp const*) { return 0; };
        GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = [](OrtCustomOp const*) { return 0; };
        GetStartVersion = GetEndVersion = [](OrtCustomOp const*) { return op_spec().version; };
        CreateKernelV2 = [](OrtCustomOp const* op, OrtApi const*, OrtKernelInfo const* info, void** kernel)
        { return guarded([&] { *kernel = new Kernel(info, static_cast<Op const*>(op)->half); }); };
        KernelComputeV2 = [](void* kernel, OrtKernelContext* context)
        { return guarded([&] { static_cast<Kernel*>(kernel)->compute(context); }); };
        KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
        InferOutputShapeFn = [](OrtCustomOp const*, OrtShapeInferContext* context) { return guarded([&] { infer(context); }); };
    }

    static ONNXTensorElementDataType type(OrtCustomOp const* op, still::TensorSpec const& spec)
    {
        switch (spec.type)
        {
        case still::ElementType::kFloat32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        case still::ElementType::kInteger: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
        default: return static_cast<Op const*>(op)->half ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        }
    }

    static OrtCustomOpInputOutputCharacteristic need(still::TensorSpec const& spec)
    {
        return spec.optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    }

    // The output is shaped as the query, and each present state as the past one.
    static void infer(OrtShapeInferContext* context)
    {
        size_t given;
        check(g_api->ShapeInferContext_GetInputCount(context, &given));
        for (size_t i = 0; i < kOutputs; ++i)
        {
            size_t const source = i == 0 ? size_t{kQuery} : kPastWindowKey + i - 1;
            if (source == kPastSalientScore || source >= given)
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
            static Op const single(false), half(true);
            static std::unique_ptr<OrtCustomOpDomain, void (*)(OrtCustomOpDomain*)> const domain = []
            {
                OrtCustomOpDomain* made;
                check(g_api->CreateCustomOpDomain(op_spec().domain.c_str(), &made));
                std::unique_ptr<OrtCustomOpDomain, void (*)(OrtCustomOpDomain*)> owner(made, g_api->ReleaseCustomOpDomain);
                check(g_api->CustomOpDomain_Add(made, &single));
                check(g_api->CustomOpDomain_Add(made, &half));
                return owner;
            }();
            check(g_api->AddCustomOpDomain(options, domain.get()));
        });
}
