// Stands for ONNX Runtime's CUDA provider: registers the library of custom ops, makes a node of one of them and runs it, in buffers that are
// numbers. Prints what came back.
// Usage: fake_onnxruntime LIBRARY OP FIRST_STATE ARGUMENT... (stand_in.h); the attribute absent_inputs has the bits of inputs that the node
// leaves out, activation_type names the activations' type.
#include "stand_in.h"

#include <onnxruntime_c_api.h>

struct OrtStatus
{
    std::string message;
};

struct OrtCustomOpDomain
{
    std::vector<OrtCustomOp const*> ops;
};

struct OrtValue
{
    ONNXTensorElementDataType type;
    std::vector<int64_t> dims;
    void* address;
};

struct OrtTensorTypeAndShapeInfo
{
    OrtValue const* value;
};

struct OrtKernelInfo
{
};

struct OrtMemoryInfo
{
} gMemory;

struct OrtKernelContext
{
    std::vector<OrtValue const*> inputs; // null where absent
    std::vector<void*> addresses;        // of outputs, those that are absent counted
    std::vector<OrtValue> outputs;
    void* stream;
};

namespace
{

StandIn gCall;
uint64_t gAbsent = 0;
OrtCustomOpDomain gDomain;

ONNXTensorElementDataType type_of(char letter)
{
    return letter == 'h' ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
        : letter == 'f'  ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
        : letter == 'w'  ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
                         : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
}

size_t count_of_inputs()
{
    size_t count = gCall.inputs.size();
    for (uint64_t bits = gAbsent; bits; bits &= bits - 1)
        ++count;
    return count;
}

OrtStatus* no() { return new OrtStatus{"not there"}; }

OrtAllocator gAllocator{18, [](OrtAllocator*, size_t) -> void* { return nullptr; },
    [](OrtAllocator*, void* memory) { std::printf("freed %p\n", memory); }, [](OrtAllocator const*) -> OrtMemoryInfo const* { return &gMemory; }};

OrtApi make_api()
{
    OrtApi api{};
    api.CreateStatus = [](OrtErrorCode, char const* text) noexcept { return new OrtStatus{text}; };
    api.HasSessionConfigEntry = [](OrtSessionOptions const*, char const*, int* there) noexcept
    {
        *there = 0;
        return static_cast<OrtStatus*>(nullptr);
    };
    api.GetErrorMessage = [](OrtStatus const* status) noexcept { return status->message.c_str(); };
    api.ReleaseStatus = [](OrtStatus* status) noexcept { delete status; };
    api.CreateCustomOpDomain = [](char const*, OrtCustomOpDomain** out) noexcept -> OrtStatus* { return *out = &gDomain, nullptr; };
    api.ReleaseCustomOpDomain = [](OrtCustomOpDomain*) noexcept {};
    api.CustomOpDomain_Add = [](OrtCustomOpDomain* domain, OrtCustomOp const* op) noexcept -> OrtStatus* {
        return domain->ops.push_back(op), nullptr;
    };
    api.AddCustomOpDomain = [](OrtSessionOptions*, OrtCustomOpDomain*) noexcept -> OrtStatus* { return nullptr; };
    api.KernelInfoGetAttribute_int64 = [](OrtKernelInfo const*, char const* name, int64_t* out) noexcept -> OrtStatus* {
        auto const* const found = gCall.attribute(name);
        return found ? *out = std::atoll(found->value.c_str()), nullptr : no();
    };
    api.KernelInfoGetAttribute_float = [](OrtKernelInfo const*, char const* name, float* out) noexcept -> OrtStatus* {
        auto const* const found = gCall.attribute(name);
        return found ? *out = static_cast<float>(std::atof(found->value.c_str())), nullptr : no();
    };
    api.KernelInfoGetAttribute_string = [](OrtKernelInfo const*, char const* name, char* out, size_t* size) noexcept -> OrtStatus* {
        auto const* const found = gCall.attribute(name);
        if (!found)
            return no();
        if (out)
            std::memcpy(out, found->value.c_str(), found->value.size() + 1);
        return *size = found->value.size() + 1, nullptr;
    };
    api.KernelInfo_GetInputCount = [](OrtKernelInfo const*, size_t* out) noexcept -> OrtStatus* { return *out = count_of_inputs(), nullptr; };
    api.KernelInfo_GetInputName = [](OrtKernelInfo const*, size_t i, char*, size_t* size) noexcept -> OrtStatus* {
        return *size = gAbsent >> i & 1 ? 1 : 2, nullptr;
    };
    api.KernelInfoGetAllocator = [](OrtKernelInfo const*, OrtMemType, OrtAllocator** out) noexcept -> OrtStatus* {
        return *out = &gAllocator, nullptr;
    };
    api.ReleaseAllocator = [](OrtAllocator*) noexcept {};
    api.AllocatorGetInfo = [](OrtAllocator const*, OrtMemoryInfo const** out) noexcept -> OrtStatus* { return *out = &gMemory, nullptr; };
    api.KernelContext_GetInput = [](OrtKernelContext const* context, size_t i, OrtValue const** out) noexcept -> OrtStatus* {
        return *out = context->inputs[i], nullptr;
    };
    api.GetTensorTypeAndShape = [](OrtValue const* value, OrtTensorTypeAndShapeInfo** out) noexcept -> OrtStatus* {
        return *out = new OrtTensorTypeAndShapeInfo{value}, nullptr;
    };
    api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo* info) noexcept { delete info; };
    api.GetTensorElementType = [](OrtTensorTypeAndShapeInfo const* info, ONNXTensorElementDataType* out) noexcept -> OrtStatus* {
        return *out = info->value->type, nullptr;
    };
    api.GetDimensionsCount = [](OrtTensorTypeAndShapeInfo const* info, size_t* out) noexcept -> OrtStatus* {
        return *out = info->value->dims.size(), nullptr;
    };
    api.GetDimensions = [](OrtTensorTypeAndShapeInfo const* info, int64_t* out, size_t) noexcept -> OrtStatus* {
        return std::copy(info->value->dims.begin(), info->value->dims.end(), out), nullptr;
    };
    api.GetTensorMutableData = [](OrtValue* value, void** out) noexcept -> OrtStatus* { return *out = value->address, nullptr; };
    api.KernelContext_GetOutput = [](OrtKernelContext* context, size_t i, int64_t const* dims, size_t rank, OrtValue** out) noexcept -> OrtStatus* {
        context->outputs[i] = {ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, {dims, dims + rank}, context->addresses[i]};
        return *out = &context->outputs[i], nullptr;
    };
    api.KernelContext_GetGPUComputeStream = [](OrtKernelContext const* context, void** out) noexcept -> OrtStatus* {
        return *out = context->stream, nullptr;
    };
    api.KernelContext_GetScratchBuffer = [](OrtKernelContext const*, OrtMemoryInfo const*, size_t size, void** out) noexcept -> OrtStatus* {
        std::printf("scratch %zu\n", size);
        return *out = reinterpret_cast<void*>(size ? 0x7000000 : 0), nullptr;
    };
    return api;
}

OrtApi const gApi = make_api();
OrtApiBase const gBase{[](uint32_t) noexcept { return &gApi; }, []() noexcept { return "1.26.0"; }};

// Whether an op has words where the call has them: there is one of its name for states in 8 bits, too.
bool takes(OrtCustomOp const& op)
{
    auto const given = gCall.inputs_of(1);
    size_t next = 0;
    for (size_t place = 0; place < count_of_inputs(); ++place)
        if (!(gAbsent >> place & 1)
            && (given[next++].type == 'w') != (op.GetInputType(&op, place) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32))
            return false;
    return true;
}

void report(char const* what, OrtStatus* status)
{
    std::printf("%s %s\n", what, status ? status->message.c_str() : "0");
    delete status;
}

// A call in one buffer for past and present, or with the present ones apart.
void compute(OrtCustomOp const& op, void* kernel, int tokens, void* stream, bool apart = false)
{
    std::vector<OrtValue> values;
    auto const shapes = gCall.inputs_of(tokens);
    for (size_t i = 0; i < shapes.size(); ++i)
        values.push_back({type_of(shapes[i].type), {shapes[i].dims.begin(), shapes[i].dims.end()}, reinterpret_cast<void*>(0x1000 * (i + 1))});
    OrtKernelContext context{};
    context.stream = stream;
    size_t next = 0;
    for (size_t place = 0; place < count_of_inputs(); ++place)
        context.inputs.push_back(gAbsent >> place & 1 ? nullptr : &values[next++]);
    context.outputs.resize(op.GetOutputTypeCount(&op));
    context.addresses.resize(context.outputs.size());
    size_t const plain = std::max<size_t>(gCall.outputs.size(), 1);
    for (size_t i = 0; i < plain; ++i)
        context.addresses[i] = reinterpret_cast<void*>(0x900000 + 0x10000 * i);
    size_t const states = context.outputs.size() - plain; // last among inputs and outputs, in the same order
    for (size_t i = 0; i < states; ++i)
        if (auto const* const past = context.inputs[context.inputs.size() - states + i])
            context.addresses[plain + i] = static_cast<char*>(past->address) + (apart ? 0x100000 : 0);
    report("compute", op.KernelComputeV2(kernel, &context));
}

} // namespace

int main(int argc, char** argv)
{
    void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        std::printf("FAILED dlopen: %s\n", dlerror());
    require(library != nullptr, "dlopen");
    gCall.read(argc, argv);
    if (auto const* const absent = gCall.attribute("absent_inputs"))
        gAbsent = std::strtoull(absent->value.c_str(), nullptr, 10);
    auto const go = reinterpret_cast<OrtStatus* (*)(OrtSessionOptions*, OrtApiBase const*)>(dlsym(library, "RegisterCustomOps"));
    require(go != nullptr, "RegisterCustomOps");
    report("registered", go(nullptr, &gBase));
    std::string const type = gCall.attribute("activation_type")->value;
    auto const wanted = type == "float16" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
        : type == "bfloat16"              ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16
                                          : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    OrtCustomOp const* op = nullptr;
    for (OrtCustomOp const* const known : gDomain.ops)
    {
        bool const cuda = std::string(known->GetExecutionProviderType(known)) == "CUDAExecutionProvider";
        if (cuda && gCall.op == known->GetName(known) && known->GetInputType(known, 0) == wanted && takes(*known))
            op = known;
        for (size_t i = 0; cuda && i < known->GetInputTypeCount(known); ++i)
            require(known->GetInputMemoryType(known, i) == OrtMemTypeDefault, "inputs on the device");
    }
    require(op != nullptr, "a kernel of the op for the CUDA provider");
    OrtKernelInfo info;
    void* kernel = nullptr;
    OrtStatus* const made = op->CreateKernelV2(op, &gApi, &info, &kernel);
    bool const there = !made;
    report("created", made);
    for (int const tokens : {150, 1})
        if (there)
            compute(*op, kernel, tokens, nullptr);
    std::printf("again\n");
    if (there)
    {
        compute(*op, kernel, 1, nullptr);
        compute(*op, kernel, 1, reinterpret_cast<void*>(7)); // another run of the session
        compute(*op, kernel, 1, nullptr, true);
        op->KernelDestroy(kernel);
    }
    gCall.print_log();
    return 0;
}
