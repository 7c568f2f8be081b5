// The CUDA driver API, opened with dlopen at first use, so that everything loads on a machine without a GPU.
// It declares the functions that it calls, so that the core needs no CUDA header. The _v2 names freeze their ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace still
{

using CuContext = void*;
using CuModule = void*;
using CuFunction = void*;
using CuStream = void*;
using CuGraph = void*;
using CuGraphExec = void*;
using CuDevicePtr = uint64_t;

class Driver
{
    // A function of the library, null if missing.
    struct Symbol
    {
        void* address;

        template <typename Function>
        operator Function*() const
        {
            return reinterpret_cast<Function*>(address);
        }
    };
    Symbol find(char const* symbol) const;
    Symbol need(char const* symbol) const; // throws still::Error if it is missing

    std::string mPath;
    void* mLibrary;

public:
    // The driver of this process, opened on the first call. Throws still::Error if there is none.
    static Driver& get();

    // Makes the next get() open `path` instead of libcuda.so.1; tests open a recording stand-in.
    static void replace(std::string const& path);

    // Throws still::Error with the driver's name and text of `status` unless it is 0.
    void check(int status, char const* call) const;

    int (*init)(unsigned) = need("cuInit");
    int (*driverGetVersion)(int*) = find("cuDriverGetVersion");
    int (*deviceGet)(int*, int) = find("cuDeviceGet");
    int (*deviceGetAttribute)(int*, int, int) = need("cuDeviceGetAttribute");
    int (*devicePrimaryCtxRetain)(CuContext*, int) = find("cuDevicePrimaryCtxRetain");
    int (*ctxGetCurrent)(CuContext*) = need("cuCtxGetCurrent");
    int (*ctxSetCurrent)(CuContext) = find("cuCtxSetCurrent");
    int (*ctxGetDevice)(int*) = need("cuCtxGetDevice");
    int (*ctxSynchronize)() = need("cuCtxSynchronize");
    int (*ctxGetId)(CuContext, unsigned long long*) = find("cuCtxGetId"); // since 12.0, else null
    int (*moduleLoadData)(CuModule*, void const*) = need("cuModuleLoadData");
    int (*moduleGetFunction)(CuFunction*, CuModule, char const*) = need("cuModuleGetFunction");
    int (*funcSetAttribute)(CuFunction, int, int) = need("cuFuncSetAttribute");
    int (*funcLoad)(CuFunction) = find("cuFuncLoad"); // since 12.4, else null
    int (*launchKernel)(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream, void**,
        void**) = need("cuLaunchKernel");
    int (*tensorMapEncodeTiled)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*, int, int, int,
        int) = find("cuTensorMapEncodeTiled"); // since 12.0, else null
    int (*memAlloc)(CuDevicePtr*, size_t) = need("cuMemAlloc_v2");
    int (*memFree)(CuDevicePtr) = need("cuMemFree_v2");
    int (*memsetD8Async)(CuDevicePtr, unsigned char, size_t, CuStream) = need("cuMemsetD8Async");
    int (*memcpyDtoDAsync)(CuDevicePtr, CuDevicePtr, size_t, CuStream) = need("cuMemcpyDtoDAsync_v2");

    // For the runner; the plugins never call these.
    int (*memGetInfo)(size_t*, size_t*) = find("cuMemGetInfo_v2");
    int (*memcpyHtoDAsync)(CuDevicePtr, void const*, size_t, CuStream) = find("cuMemcpyHtoDAsync_v2");
    int (*memcpyDtoHAsync)(void*, CuDevicePtr, size_t, CuStream) = find("cuMemcpyDtoHAsync_v2");
    int (*streamCreate)(CuStream*, unsigned) = find("cuStreamCreate");
    int (*streamSynchronize)(CuStream) = find("cuStreamSynchronize");
    int (*streamBeginCapture)(CuStream, int) = find("cuStreamBeginCapture_v2");
    int (*streamEndCapture)(CuStream, CuGraph*) = find("cuStreamEndCapture");
    int (*graphInstantiate)(CuGraphExec*, CuGraph, unsigned long long) = find("cuGraphInstantiateWithFlags");
    int (*graphLaunch)(CuGraphExec, CuStream) = find("cuGraphLaunch");

private:
    explicit Driver(std::string const& path);

    int (*mErrorName)(int, char const**) = find("cuGetErrorName");
    int (*mErrorString)(int, char const**) = find("cuGetErrorString");
};

// Zeroed device memory in the context that was current at construction.
class ZeroedMemory
{
public:
    explicit ZeroedMemory(size_t bytes);
    ~ZeroedMemory();
    ZeroedMemory(ZeroedMemory const&) = delete;
    ZeroedMemory& operator=(ZeroedMemory const&) = delete;
    CuDevicePtr address() const { return mAddress; }
    size_t bytes() const { return mBytes; }

private:
    CuDevicePtr mAddress{};
    size_t mBytes{};
};

// Compute capability of the current context's device, 90 for 9.0.
int current_architecture();

// An id of the current context, unique in the process if the driver supports it (a new context may reuse an old address).
uint64_t current_context();

} // namespace still
