// The CUDA driver API, opened with dlopen at first use: everything loads on a machine without a GPU.
// Declares what it calls itself, so that the core needs no CUDA header; the ABI of these functions is frozen by their _v2 names.
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
using CuEvent = void*;
using CuDevicePtr = uint64_t;

class Driver
{
public:
    // The driver of this process; opens it on the first call. Throws still::Error where there is none.
    static Driver& get();

    // Opens `path` instead of libcuda.so.1 from the next get() on: tests put a recording stand-in here.
    static void replace(std::string const& path);

    // Throws still::Error with the driver's own name and text of `status` when it is not 0.
    void check(int status, char const* call) const;

    int (*init)(unsigned){};
    int (*driverGetVersion)(int*){};
    int (*deviceGet)(int*, int){};
    int (*deviceGetName)(char*, int, int){};
    int (*deviceGetAttribute)(int*, int, int){};
    int (*devicePrimaryCtxRetain)(CuContext*, int){};
    int (*ctxGetCurrent)(CuContext*){};
    int (*ctxSetCurrent)(CuContext){};
    int (*ctxGetDevice)(int*){};
    int (*ctxSynchronize)(){};
    int (*ctxGetId)(CuContext, unsigned long long*){}; // since 12.0, else null
    int (*moduleLoadData)(CuModule*, void const*){};
    int (*moduleGetFunction)(CuFunction*, CuModule, char const*){};
    int (*funcSetAttribute)(CuFunction, int, int){};
    int (*funcLoad)(CuFunction){}; // since 12.4, else null
    int (*launchKernel)(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream, void**,
        void**){};
    int (*tensorMapEncodeTiled)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*, int, int, int,
        int){}; // since 12.0, else null
    int (*memAlloc)(CuDevicePtr*, size_t){};
    int (*memFree)(CuDevicePtr){};
    int (*memsetD8Async)(CuDevicePtr, unsigned char, size_t, CuStream){};
    int (*memcpyDtoDAsync)(CuDevicePtr, CuDevicePtr, size_t, CuStream){};

    // What the runner needs besides; the plugins never call these.
    int (*memGetInfo)(size_t*, size_t*){};
    int (*memHostAlloc)(void**, size_t, unsigned){};
    int (*memcpyHtoDAsync)(CuDevicePtr, void const*, size_t, CuStream){};
    int (*memcpyDtoHAsync)(void*, CuDevicePtr, size_t, CuStream){};
    int (*streamCreate)(CuStream*, unsigned){};
    int (*streamSynchronize)(CuStream){};
    int (*streamBeginCapture)(CuStream, int){};
    int (*streamEndCapture)(CuStream, CuGraph*){};
    int (*graphInstantiate)(CuGraphExec*, CuGraph, unsigned long long){};
    int (*graphLaunch)(CuGraphExec, CuStream){};

private:
    explicit Driver(std::string const& path);

    std::string mPath;
    int (*mErrorName)(int, char const**){};
    int (*mErrorString)(int, char const**){};
};

// Compute capability of the current context's device as one number, 90 for 9.0.
int current_architecture();

// The current context, made unique over the life of the process where the driver can (a new context may reuse an old address).
uint64_t current_context();

} // namespace still
