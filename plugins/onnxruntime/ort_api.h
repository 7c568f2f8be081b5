// What of ONNX Runtime's C API the op uses, with exceptions for statuses.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "onnxruntime_c_api.h"
#include "schema.h"

static_assert(ORT_API_VERSION >= 18, "the headers are older than ONNX Runtime 1.18");

namespace still_ort
{

// The oldest API with everything that is called here; later runtimes serve it too.
constexpr uint32_t kApiVersion = 18;

inline OrtApi const* g_api = nullptr;

// A failed call of ONNX Runtime; its message.
struct Failed : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

inline void check(OrtStatus* status)
{
    if (!status)
        return;
    std::string const message = g_api->GetErrorMessage(status);
    g_api->ReleaseStatus(status);
    throw Failed(message);
}

// Runs fn; an exception becomes the status that it is to the host.
template <typename Function>
OrtStatus* guarded(Function fn) noexcept
{
    try
    {
        fn();
        return nullptr;
    }
    catch (Refused const& error)
    {
        return g_api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
    }
    catch (std::exception const& error)
    {
        return g_api->CreateStatus(ORT_FAIL, error.what());
    }
}

struct NodeAttributes : Attributes
{
    OrtKernelInfo const* info;

    explicit NodeAttributes(OrtKernelInfo const* node) : info(node) {}

    // ONNX Runtime knows no "absent": every failure to read one means it.
    static bool found(OrtStatus* status)
    {
        if (status)
            g_api->ReleaseStatus(status);
        return !status;
    }
    int64_t integer(char const* name, int64_t otherwise) const override
    {
        int64_t value;
        return found(g_api->KernelInfoGetAttribute_int64(info, name, &value)) ? value : otherwise;
    }
    float real(char const* name, float otherwise) const override
    {
        float value;
        return found(g_api->KernelInfoGetAttribute_float(info, name, &value)) ? value : otherwise;
    }
    std::string text(char const* name, std::string const& otherwise) const override
    {
        char value[64];
        size_t size = sizeof value;
        return found(g_api->KernelInfoGetAttribute_string(info, name, value, &size)) ? std::string(value) : otherwise;
    }
};

// Scratch memory from the host's arena.
struct Memory
{
    OrtAllocator* allocator = nullptr;
    void* data = nullptr;

    Memory(OrtKernelContext const* context, OrtMemoryInfo const* info, size_t size)
    {
        check(g_api->KernelContext_GetAllocator(context, info, &allocator));
        data = allocator->Alloc(allocator, size);
        if (!data)
        {
            g_api->ReleaseAllocator(allocator);
            throw Failed("no memory for " + std::to_string(size >> 20) + " MiB of intermediate results.");
        }
    }
    Memory(Memory const&) = delete;
    Memory& operator=(Memory const&) = delete;
    ~Memory()
    {
        if (data)
            allocator->Free(allocator, data);
        g_api->ReleaseAllocator(allocator);
    }
};

inline std::vector<int64_t> shape_of(OrtValue const* value)
{
    OrtTensorTypeAndShapeInfo* info;
    check(g_api->GetTensorTypeAndShape(value, &info));
    std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> const owner(
        info, g_api->ReleaseTensorTypeAndShapeInfo);
    size_t rank;
    check(g_api->GetDimensionsCount(info, &rank));
    std::vector<int64_t> shape(rank);
    check(g_api->GetDimensions(info, shape.data(), rank));
    return shape;
}

inline void* data_of(OrtValue const* value)
{
    void* data;
    check(g_api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    return data;
}

} // namespace still_ort
