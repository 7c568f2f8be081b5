#include "engine.h"

#include "../core/error.h"
#include "files.h"
#include "manifest.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace still
{
namespace
{

class Logger final : public nvinfer1::ILogger
{
    void log(Severity severity, char const* text) noexcept override
    {
        if (severity <= Severity::kERROR)
            std::fprintf(stderr, "TensorRT: %s\n", text);
    }
} sLogger;

// A mapped file: a plan may have gigabytes, and some devices share one memory with the host.
class MappedFile
{
public:
    // Throws if the file cannot be read or its size differs from `bytes`.
    MappedFile(std::string const& path, int64_t bytes) : mData(MAP_FAILED), mBytes(static_cast<size_t>(bytes))
    {
        int const file = open(path.c_str(), O_RDONLY);
        struct stat found{};
        bool const there = file >= 0 && fstat(file, &found) == 0;
        if (there && found.st_size == bytes && bytes > 0)
            mData = mmap(nullptr, mBytes, PROT_READ, MAP_PRIVATE, file, 0);
        if (file >= 0)
            close(file);
        if (!there)
            fail(path, " cannot be opened.");
        if (mData == MAP_FAILED)
            fail(path, " has ", found.st_size, " bytes, the manifest says ", bytes, ": it is truncated or replaced. Copy it again.");
    }
    ~MappedFile() { munmap(mData, mBytes); }
    MappedFile(MappedFile const&) = delete;
    MappedFile& operator=(MappedFile const&) = delete;
    void const* data() const { return mData; }
    size_t bytes() const { return mBytes; }

private:
    void* mData;
    size_t mBytes;
};

size_t item_bytes(nvinfer1::DataType type) { return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kINT32 ? 4 : 2; }

cudaStream_t cuda(CuStream stream) { return reinterpret_cast<cudaStream_t>(stream); }

} // namespace

Engine::Engine(std::string const& folder, std::string const& plugin, int device, bool trust)
    : mFolder(folder), mTrust(trust), mManifest(read_manifest(folder)), mDriver(Driver::get())
{
    if (text_of(mManifest.at("target")) != "trt")
        fail(folder, " is a package for ", text_of(mManifest.at("target")), "; still_run needs one exported with --to trt.");
    if (mManifest.value("engines", Json::array()).empty())
        fail(folder, " has no engine yet. Build it on this machine: still-export build ", folder);
    mEntry = items_of(mManifest.at("engines"))[0];
    if (mEntry.value("stripped", false))
        fail("the engine holds no weights (--strip-weights), and taking them from the graph needs TensorRT's Python module. Run it with ", folder,
            "/run_trt.py, or export without --strip-weights.");
    std::string const& name = text_of(mEntry.at("file"));
    MappedFile const plan(inside(mFolder, name), integer_of(mEntry.at("size_bytes")));
    int handle = 0;
    CuContext context = nullptr;
    mDriver.check(mDriver.deviceGet(&handle, device), "cuDeviceGet");
    mDriver.check(mDriver.devicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
    mDriver.check(mDriver.ctxSetCurrent(context), "cuCtxSetCurrent");
    mDriver.check(mDriver.streamCreate(&mStream, 1), "cuStreamCreate");
    std::string const architecture = "sm_" + std::to_string(current_architecture());
    auto const& built = items_of(mEntry.at("archs"));
    if (std::none_of(built.begin(), built.end(), [&](Json const& item) { return text_of(item) == architecture; }))
        fail("the engine was built for ", text_of(built[0]), ", this GPU is ", architecture, ". Build it again here: still-export build ", folder);
    open_tensorrt(plugin);
    check_native(mManifest, mFolder + "/" + name, name, plan.data(), plan.bytes(), mTrust);
    mEngine.reset(mRuntime->deserializeCudaEngine(plan.data(), plan.bytes()));
    if (!mEngine)
        fail("TensorRT refused ", text_of(mEntry.at("file")), "; its reason stands above. Build it again: still-export build ", mFolder);
    make_contexts();
}

std::unique_ptr<ZeroedMemory> Engine::memory(size_t bytes) const
{
    try
    {
        return std::make_unique<ZeroedMemory>(bytes);
    }
    catch (Error const& error)
    {
        size_t free = 0, total = 0;
        mDriver.memGetInfo(&free, &total);
        fail(error.what(), " ", bytes >> 20, " MiB more were needed, ", free >> 20, " of ", total >> 20,
            " MiB are free. Use a shorter context.");
    }
}

void Engine::open_tensorrt(std::string const& plugin)
{
    std::string const version = text_of(mEntry.at("tensorrt"));
    int const major = std::atoi(version.c_str());
    // A version-compatible plan contains its own runtime and the plugin library.
    bool const compatible = mManifest.at("trt").at("version_compatible").get<bool>();
    if (compatible ? major > NV_TENSORRT_MAJOR : major != NV_TENSORRT_MAJOR)
        fail("the engine was built by TensorRT ", version, ", this program for TensorRT ", NV_TENSORRT_MAJOR, ". Build still_run with its headers.");
    std::string const generation = std::to_string(NV_TENSORRT_MAJOR);
    std::string const name = "libnvinfer.so." + generation;
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        fail(name, " cannot be opened. Install TensorRT ", version, ", or name its folder in LD_LIBRARY_PATH.");
    // The variant that registers itself, because this program only opens it.
    std::string const own = "libstill_tensorrt" + generation + "_static.so";
    std::string const path = plugin.empty() ? inside(mFolder, own) : plugin;
    if (!compatible && plugin.empty())
    {
        std::ifstream file(path, std::ios::binary);
        if (!file)
            fail("the plugin library ", path, " cannot be loaded: it is missing. Name it with --plugin.");
        std::string const content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        check_native(mManifest, path, own, content.data(), content.size(), mTrust);
    }
    if (!compatible && !dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
    {
        char const* const why = dlerror();
        fail("the plugin library ", path, " cannot be loaded: ", why ? why : "unknown reason", ". Name it with --plugin.");
    }
    using Create = void* (*) (void*, int32_t);
    auto const create = reinterpret_cast<Create>(dlsym(library, "createInferRuntime_INTERNAL"));
    if (!create)
        fail(name, " has no createInferRuntime_INTERNAL; it is no TensorRT runtime.");
    mRuntime.reset(static_cast<nvinfer1::IRuntime*>(create(&sLogger, NV_TENSORRT_VERSION)));
    if (!mRuntime)
        fail("TensorRT made no runtime; its reason stands above.");
    mRuntime->setEngineHostCodeAllowed(compatible);
}

void Engine::make_contexts()
{
#if NV_TENSORRT_MAJOR >= 10
    mScratch = memory(static_cast<size_t>(mEngine->getDeviceMemorySizeV2()));
#else
    mScratch = memory(mEngine->getDeviceMemorySize());
#endif
    for (int const profile : {kPrefill, kDecode})
    {
#if NV_TENSORRT_MAJOR >= 10
        mContexts[profile].reset(mEngine->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
#else
        mContexts[profile].reset(mEngine->createExecutionContextWithoutDeviceMemory());
#endif
        auto& context = mContexts[profile];
        if (!context)
            fail("TensorRT made no execution context; its reason stands above.");
        // One scratch memory for both, which never run at the same time.
#if NV_TENSORRT_MAJOR >= 10
        context->setDeviceMemoryV2(reinterpret_cast<void*>(mScratch->address()), static_cast<int64_t>(mScratch->bytes()));
#else
        context->setDeviceMemory(reinterpret_cast<void*>(mScratch->address()));
#endif
        context->setOptimizationProfileAsync(profile, cuda(mStream));
    }
    mDriver.check(mDriver.streamSynchronize(mStream), "cuStreamSynchronize");
}

nvinfer1::Dims Engine::dims(State const& state)
{
    nvinfer1::Dims dims{};
    for (int64_t const size : state.shape)
        dims.d[dims.nbDims++] = static_cast<std::remove_reference_t<decltype(dims.d[0])>>(size);
    return dims;
}

void Engine::start(int64_t tokens)
{
    mStates = states_for(mManifest, tokens);
    mLength = 0;
    mGraph = nullptr;
    mBuffers.clear();
    std::fill(std::begin(mBound), std::end(mBound), -1);
    auto const add = [&](std::string const& name, size_t bytes) { mBuffers[name] = memory(bytes); };
    auto const longest = static_cast<size_t>(integer_of(mEntry.at("prefill_tokens")));
    size_t const rows = std::min(longest, most_rows());
    add("input_ids", 4 * longest);
    for (char const* name : {"new_tokens", "past_length", "present_length"})
        add(name, 4);
    add("next_token", 4 * rows);
    add("logits", rows * item_bytes(mEngine->getTensorDataType("logits")) * static_cast<size_t>(integer_of(mManifest.at("model").at("vocab_size"))));
    for (State const& state : mStates)
        add(state.name, size_bytes(state));
}

size_t Engine::most_rows() const
{
    if (mManifest.at("model").at("all_logits").get<bool>())
        return SIZE_MAX;
    return 1 + static_cast<size_t>(mManifest.value("speculate", 0));
}

size_t Engine::state_bytes() const
{
    size_t bytes = 0;
    for (State const& state : mStates)
        bytes += mBuffers.at(state.name)->bytes();
    return bytes;
}

void Engine::bind(Profile profile, int64_t tokens)
{
    if (mBound[profile] == tokens)
        return;
    auto& context = *mContexts[profile];
    using Size = std::remove_reference_t<decltype(nvinfer1::Dims{}.d[0])>;
    nvinfer1::Dims ids{};
    ids.nbDims = 2;
    ids.d[0] = 1;
    ids.d[1] = static_cast<Size>(tokens);
    nvinfer1::Dims one{};
    one.nbDims = 1;
    one.d[0] = 1;
    bool good = context.setInputShape("input_ids", ids) && context.setInputShape("new_tokens", one) && context.setInputShape("past_length", one);
    for (char const* name : {"input_ids", "new_tokens", "past_length", "present_length", "next_token", "logits"})
        good = good && context.setTensorAddress(name, reinterpret_cast<void*>(mBuffers.at(name)->address()));
    for (State const& state : mStates)
    {
        std::string const& name = state.name;
        void* const address = reinterpret_cast<void*>(mBuffers.at(name)->address()); // past and present share a buffer
        good = good && context.setInputShape(("past_" + name).c_str(), dims(state)) && context.setTensorAddress(("past_" + name).c_str(), address)
            && context.setTensorAddress(("present_" + name).c_str(), address);
    }
    if (!good)
        fail("the engine rejected a call of ", tokens, " tokens; TensorRT's reason stands above.");
    mBound[profile] = tokens;
}

void Engine::run(Profile profile, int64_t tokens)
{
    bind(profile, tokens);
    if (!mContexts[profile]->enqueueV3(cuda(mStream)))
        fail("TensorRT could not run ", tokens, " tokens; its reason stands above.");
}

void Engine::write(std::string const& name, std::vector<int32_t> const& values)
{
    mDriver.check(mDriver.memcpyHtoDAsync(mBuffers.at(name)->address(), values.data(), 4 * values.size(), mStream), "cuMemcpyHtoDAsync");
}

int32_t Engine::next_token()
{
    int32_t token = 0;
    mDriver.check(mDriver.memcpyDtoHAsync(&token, mBuffers.at("input_ids")->address(), 4, mStream), "cuMemcpyDtoHAsync");
    mDriver.check(mDriver.streamSynchronize(mStream), "cuStreamSynchronize");
    return token;
}

int32_t Engine::prefill(std::vector<int32_t> const& prompt)
{
    auto const most = static_cast<size_t>(integer_of(mEntry.at("prefill_tokens")));
    int64_t const vocabulary = integer_of(mManifest.at("model").at("vocab_size"));
    for (int32_t const token : prompt)
        if (token < 0 || token >= vocabulary)
            fail("token ", token, " is outside the vocabulary 0..", vocabulary - 1, ".");
    size_t last = 0;
    for (size_t begin = 0; begin < prompt.size(); begin += most)
    {
        std::vector<int32_t> const piece(prompt.begin() + static_cast<std::ptrdiff_t>(begin),
            prompt.begin() + static_cast<std::ptrdiff_t>(std::min(begin + most, prompt.size())));
        auto const count = static_cast<int32_t>(piece.size());
        write("input_ids", piece);
        write("new_tokens", {count});
        write("past_length", {mLength});
        run(count == 1 ? kDecode : kPrefill, count);
        mLength += count;
        last = piece.size() - 1;
    }
    size_t const row = std::min(last, most_rows() - 1);
    mDriver.check(mDriver.memcpyDtoDAsync(mBuffers.at("input_ids")->address(), mBuffers.at("next_token")->address() + 4 * row, 4, mStream),
        "cuMemcpyDtoDAsync");
    return next_token();
}

void Engine::capture()
{
    // Load modules and tactics before the capture; a step of 0 tokens changes no state.
    int32_t const token = next_token();
    write("past_length", {mLength});
    write("new_tokens", {0});
    run(kDecode, 1);
    mDriver.check(mDriver.streamSynchronize(mStream), "cuStreamSynchronize");
    CuGraph graph = nullptr;
    mDriver.check(mDriver.streamBeginCapture(mStream, 2), "cuStreamBeginCapture");
    run(kDecode, 1);
    mDriver.check(mDriver.memcpyDtoDAsync(mBuffers.at("past_length")->address(), mBuffers.at("present_length")->address(), 4, mStream), "cuMemcpyDtoDAsync");
    mDriver.check(mDriver.memcpyDtoDAsync(mBuffers.at("input_ids")->address(), mBuffers.at("next_token")->address(), 4, mStream), "cuMemcpyDtoDAsync");
    mDriver.check(mDriver.streamEndCapture(mStream, &graph), "cuStreamEndCapture");
    mDriver.check(mDriver.graphInstantiate(&mGraph, graph, 0), "cuGraphInstantiate");
    write("input_ids", {token});
    write("new_tokens", {1});
}

int32_t Engine::step()
{
    if (!mGraph)
        capture();
    mDriver.check(mDriver.graphLaunch(mGraph, mStream), "cuGraphLaunch");
    ++mLength;
    return next_token();
}

} // namespace still
