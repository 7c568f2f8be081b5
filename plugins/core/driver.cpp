#include "driver.h"

#include "error.h"

#include <dlfcn.h>

#include <algorithm>
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

Driver::Driver(std::string const& path) : mPath(path), mLibrary(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
{
    check(init(0), "cuInit");
}

Driver::Symbol Driver::find(char const* symbol) const
{
    if (!mLibrary)
    {
        char const* why = dlerror();
        fail("CUDA driver: cannot open ", mPath, ": ", why ? why : "unknown reason",
            ". The kernels need an NVIDIA GPU and its driver.");
    }
    return {dlsym(mLibrary, symbol)};
}

Driver::Symbol Driver::need(char const* symbol) const
{
    Symbol const found = find(symbol);
    if (!found.address)
        fail("CUDA driver: ", mPath, " has no ", symbol, "; it is too old.");
    return found;
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

ZeroedMemory::ZeroedMemory(size_t bytes) : mBytes(std::max<size_t>(bytes, 16))
{
    Driver& driver = Driver::get();
    driver.check(driver.memAlloc(&mAddress, mBytes), "cuMemAlloc");
    driver.check(driver.memsetD8Async(mAddress, 0, mBytes, nullptr), "cuMemsetD8Async");
    driver.check(driver.ctxSynchronize(), "cuCtxSynchronize"); // launches use another stream
}

ZeroedMemory::~ZeroedMemory()
{
    Driver::get().memFree(mAddress); // a failure means that the context and its memory are gone
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
        fail("CUDA driver: no context is current on this thread; make one current before kernels load or run.");
    unsigned long long id = 0;
    if (driver.ctxGetId && driver.ctxGetId(context, &id) == 0)
        return id;
    return reinterpret_cast<uint64_t>(context);
}

} // namespace still
