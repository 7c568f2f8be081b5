// A stand-in for libcuda that runs nothing and writes down every call, for tests of the core without a GPU.
// A launch has no argument count, so the test says per entry point what it takes: p pointer, i int32, l int64, f float, d descriptor.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace
{

std::string gLog;
std::map<std::string, std::string> gArguments; // entry point -> types
std::map<std::string, int> gFailures;          // call -> status
std::map<void*, std::string> gFunctions;
std::map<std::string, char> gHandles; // the address stands for a function
int gArchitecture = 90;
uint64_t gNextAddress = 0x10000000;
unsigned long long gContext = 1;

int record(std::string const& call, std::string const& text)
{
    gLog += call + " " + text + "\n";
    auto const failure = gFailures.find(call);
    return failure == gFailures.end() ? 0 : failure->second;
}

} // namespace

extern "C" {

char const* recording_log() { return gLog.c_str(); }
void recording_reset() { gLog.clear(), gFailures.clear(), gContext += 1; }
void recording_architecture(int value) { gArchitecture = value; }
void recording_arguments(char const* symbol, char const* types) { gArguments[symbol] = types; }
void recording_fail(char const* call, int status) { gFailures[call] = status; }

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int status, char const** name)
{
    *name = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
    return 0;
}
int cuGetErrorString(int, char const** text)
{
    *text = "stand-in";
    return 0;
}
int cuCtxGetCurrent(void** context)
{
    *context = &gContext;
    return 0;
}
int cuCtxGetId(void*, unsigned long long* id)
{
    *id = gContext;
    return 0;
}
int cuCtxGetDevice(int* device)
{
    *device = 0;
    return 0;
}
int cuCtxSynchronize() { return record("cuCtxSynchronize", ""); }
int cuDeviceGetAttribute(int* value, int attribute, int)
{
    *value = attribute == 75 ? gArchitecture / 10 : gArchitecture % 10;
    return 0;
}
int cuModuleLoadData(void** module, void const* data)
{
    *module = const_cast<void*>(data);
    std::string start; // a cubin of a test is text; a real one stops being text after "ELF"
    for (char const* at = static_cast<char const*>(data); start.size() < 16 && *at >= ' ' && *at <= '~'; ++at)
        start += *at;
    return record("cuModuleLoadData", start);
}
int cuModuleGetFunction(void** function, void*, char const* symbol)
{
    *function = &gHandles[symbol];
    gFunctions[*function] = symbol;
    return record("cuModuleGetFunction", symbol);
}
int cuFuncSetAttribute(void* function, int attribute, int value)
{
    return record("cuFuncSetAttribute", gFunctions[function] + " " + std::to_string(attribute) + "=" + std::to_string(value));
}
int cuFuncLoad(void*) { return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t bytes)
{
    *address = gNextAddress;
    gNextAddress += (bytes + 255) / 256 * 256;
    return record("cuMemAlloc", std::to_string(bytes));
}
int cuMemFree_v2(uint64_t) { return 0; }
int cuMemsetD8Async(uint64_t, unsigned char value, size_t bytes, void*)
{
    return record("cuMemsetD8Async", std::to_string(value) + " " + std::to_string(bytes));
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void* stream)
{
    char text[128];
    std::snprintf(text, sizeof(text), "%lu %lu %zu stream=%lu", static_cast<unsigned long>(target), static_cast<unsigned long>(source),
        bytes, static_cast<unsigned long>(reinterpret_cast<uintptr_t>(stream)));
    return record("cuMemcpyDtoDAsync", text);
}
// A descriptor holds what it was made of: type, address, columns, rows, bytes of a row, columns and rows of a block, swizzle.
int cuTensorMapEncodeTiled(void* map, int element, uint32_t rank, void* address, uint64_t const* sizes, uint64_t const* strides,
    uint32_t const* box, uint32_t const* steps, int interleave, int swizzle, int promotion, int fill)
{
    bool const known = rank == 2 && steps[0] == 1 && steps[1] == 1 && interleave == 0 && promotion == 2 && fill == 0;
    uint64_t const words[16] = {static_cast<uint64_t>(element), reinterpret_cast<uintptr_t>(address), sizes[0], sizes[1], strides[0], box[0],
        box[1], static_cast<uint64_t>(swizzle)};
    std::memcpy(map, words, sizeof(words));
    return record("cuTensorMapEncodeTiled", known && reinterpret_cast<uintptr_t>(map) % 64 == 0 ? "" : "unknown");
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void* stream, void** arguments, void**)
{
    std::string const& symbol = gFunctions[function];
    char text[192];
    std::snprintf(text, sizeof(text), "%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%lu args=", symbol.c_str(), x, y, z, bx, by, bz,
        shared, static_cast<unsigned long>(reinterpret_cast<uintptr_t>(stream)));
    std::string line = text;
    std::string const& types = gArguments[symbol];
    for (size_t i = 0; i < types.size(); ++i)
    {
        if (types[i] == 'p' || types[i] == 'l')
        {
            uint64_t value = 0;
            std::memcpy(&value, arguments[i], sizeof(value));
            line += std::to_string(value);
        }
        else if (types[i] == 'd')
        {
            uint64_t words[8];
            std::memcpy(words, arguments[i], sizeof(words));
            for (size_t k = 0; k < 8; ++k)
                line += std::to_string(words[k]) + (k < 7 ? "/" : "");
        }
        else if (types[i] == 'i')
        {
            int32_t value = 0;
            std::memcpy(&value, arguments[i], sizeof(value));
            line += std::to_string(value);
        }
        else
        {
            float value = 0;
            std::memcpy(&value, arguments[i], sizeof(value));
            std::snprintf(text, sizeof(text), "%.6g", static_cast<double>(value));
            line += text;
        }
        line += i + 1 < types.size() ? "," : "";
    }
    return record("cuLaunchKernel", line);
}
}
