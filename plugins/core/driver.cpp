#include "driver.h"

#include "error.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>

namespace still
{
namespace
{

constexpr char kLibrary[] = "libcuda.so.1";
constexpr int kCapabilityMajor = 75; // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
constexpr int kCapabilityMinor = 76;

std::mutex sMutex;
std::string sPath = kLibrary;
std::unique_ptr<Driver> sDriver;

} // namespace

Driver& Driver::get()
{
    std::lock_guard<std::mutex> const lock(sMutex);
    if (!sDriver)
        sDriver.reset(new Driver(sPath));
    return *sDriver;
}

void Driver::replace(std::string const& path)
{
    std::lock_guard<std::mutex> const lock(sMutex);
    sPath = path;
    sDriver.reset();
}

Driver::Driver(std::string const& path) : mPath(path)
{
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library)
    {
        char const* why = dlerror();
        fail("CUDA driver: cannot open ", path, ": ", why ? why : "unknown reason",
            ". The kernels need an NVIDIA GPU and its driver.");
    }
    auto const find = [&](auto& function, char const* symbol, bool required) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
        if (!function && required)
            fail("CUDA driver: ", path, " has no ", symbol, "; it is too old.");
    };
    find(init, "cuInit", true);
    find(driverGetVersion, "cuDriverGetVersion", false);
    find(deviceGet, "cuDeviceGet", false);
    find(deviceGetName, "cuDeviceGetName", false);
    find(deviceGetAttribute, "cuDeviceGetAttribute", true);
    find(devicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", false);
    find(ctxGetCurrent, "cuCtxGetCurrent", true);
    find(ctxSetCurrent, "cuCtxSetCurrent", false);
    find(ctxGetDevice, "cuCtxGetDevice", true);
    find(ctxGetId, "cuCtxGetId", false);
    find(moduleLoadData, "cuModuleLoadData", true);
    find(moduleGetFunction, "cuModuleGetFunction", true);
    find(funcSetAttribute, "cuFuncSetAttribute", true);
    find(funcLoad, "cuFuncLoad", false);
    find(launchKernel, "cuLaunchKernel", true);
    find(tensorMapEncodeTiled, "cuTensorMapEncodeTiled", false);
    find(memsetD8Async, "cuMemsetD8Async", true);
    find(memcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", true);
    find(memAlloc, "cuMemAlloc_v2", true);
    find(memFree, "cuMemFree_v2", true);
    find(ctxSynchronize, "cuCtxSynchronize", true);
    find(memGetInfo, "cuMemGetInfo_v2", false);
    find(memHostAlloc, "cuMemHostAlloc", false);
    find(memcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", false);
    find(memcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", false);
    find(streamCreate, "cuStreamCreate", false);
    find(streamSynchronize, "cuStreamSynchronize", false);
    find(streamBeginCapture, "cuStreamBeginCapture_v2", false);
    find(streamEndCapture, "cuStreamEndCapture", false);
    find(graphInstantiate, "cuGraphInstantiateWithFlags", false);
    find(graphLaunch, "cuGraphLaunch", false);
    find(mErrorName, "cuGetErrorName", false);
    find(mErrorString, "cuGetErrorString", false);
    check(init(0), "cuInit");
}

void Driver::check(int status, char const* call) const
{
    if (status == 0)
        return;
    char const* name = nullptr;
    char const* text = nullptr;
    if (mErrorName)
        mErrorName(status, &name);
    if (mErrorString)
        mErrorString(status, &text);
    fail("CUDA driver: ", call, " failed with ", status, " (", name ? name : "unknown", text ? ": " : "", text ? text : "", ").");
}

int current_architecture()
{
    Driver& driver = Driver::get();
    int device = 0;
    int major = 0;
    int minor = 0;
    driver.check(driver.ctxGetDevice(&device), "cuCtxGetDevice");
    driver.check(driver.deviceGetAttribute(&major, kCapabilityMajor, device), "cuDeviceGetAttribute");
    driver.check(driver.deviceGetAttribute(&minor, kCapabilityMinor, device), "cuDeviceGetAttribute");
    return 10 * major + minor;
}

uint64_t current_context()
{
    Driver& driver = Driver::get();
    CuContext context = nullptr;
    driver.check(driver.ctxGetCurrent(&context), "cuCtxGetCurrent");
    if (!context)
        fail("CUDA driver: no context is current on this thread; kernels load and run on threads that have made the GPU theirs.");
    unsigned long long id = 0;
    if (driver.ctxGetId && driver.ctxGetId(context, &id) == 0)
        return id;
    return reinterpret_cast<uint64_t>(context);
}

} // namespace still
