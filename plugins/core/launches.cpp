#include "launches.h"

#include "error.h"

#include <cstring>
#include <mutex>
#include <utility>

namespace still
{
namespace
{

constexpr unsigned kDefaultSharedBytes = 48 * 1024;
constexpr int kMaxDynamicSharedBytes = 8; // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
// CUDA_ERROR_INVALID_IMAGE, _NO_BINARY_FOR_GPU, _UNSUPPORTED_PTX_VERSION: results of drivers older than the code.
constexpr int kInvalidImage = 200;
constexpr int kNoBinary = 209;
constexpr int kNewerCompiler = 222;
constexpr int64_t kMaxGridX = 2147483647;
constexpr int64_t kMaxGrid = 65535; // along y and z
constexpr int kTensorMapUInt8 = 0; // CUtensorMapDataType
constexpr int kTensorMapFloat16 = 6;
constexpr int kTensorMapBFloat16 = 9;
constexpr int kPromoteTo128Bytes = 2; // CU_TENSOR_MAP_L2_PROMOTION_L2_128B

// Modules stay loaded: layers share them, and unloading at exit would race with the host's teardown.
std::mutex sMutex;

std::map<std::pair<uint64_t, char const*>, CuFunction>& loaded()
{
    static auto* const functions = new std::map<std::pair<uint64_t, char const*>, CuFunction>;
    return *functions;
}

// A number as the kernel's bits.
uint64_t bits(std::string const& kernel, std::string const& name, std::string const& type, Argument const& argument)
{
    uint64_t value = 0;
    if (type == "i32")
    {
        auto const narrow = static_cast<int32_t>(argument.integer);
        if (narrow != argument.integer)
            fail(kernel, ": argument ", name, "=", argument.integer, " does not fit 32 bits.");
        std::memcpy(&value, &narrow, sizeof(narrow));
    }
    else if (type == "i64")
        std::memcpy(&value, &argument.integer, sizeof(argument.integer));
    else if (type == "f32")
    {
        auto const narrow = static_cast<float>(argument.real);
        std::memcpy(&value, &narrow, sizeof(narrow));
    }
    else
        fail(kernel, ": argument ", name, " has the unknown type ", type, ".");
    return value;
}

Descriptor describe(Kernel const& kernel, KernelArgument const& argument, Matrix const& matrix)
{
    Descriptor made;
    made.matrix = matrix;
    made.swizzle = argument.swizzle;
    made.element_bytes = 2;
    if (argument.element == "fp16")
        made.element = kTensorMapFloat16;
    else if (argument.element == "bf16")
        made.element = kTensorMapBFloat16;
    else if (argument.element == "fp8e4nv")
    {
        made.element = kTensorMapUInt8;
        made.element_bytes = 1;
    }
    else
        fail(kernel.name, ": the descriptor ", argument.name, " has elements of the unknown type ", argument.element, ".");
    for (size_t i = 0; i < 2; ++i)
        made.box[i] = argument.box[i];
    return made;
}

// Null if missing.
template <typename Value>
Value const* find(std::map<std::string, Value> const& values, std::string const& name)
{
    auto const found = values.find(name);
    return found == values.end() ? nullptr : &found->second;
}

struct alignas(64) TensorMap // CUtensorMap
{
    uint64_t words[16]{};
};

// A tensor without elements has an empty descriptor, since nothing is copied from it.
TensorMap encode(Descriptor const& descriptor, uint64_t address, std::string const& kernel)
{
    TensorMap map;
    if (address == 0 || descriptor.matrix.rows == 0 || descriptor.matrix.columns == 0)
        return map;
    Driver& driver = Driver::get();
    if (!driver.tensorMapEncodeTiled)
        fail("CUDA driver: it has no cuTensorMapEncodeTiled, which kernel ", kernel, " needs; it is too old.");
    uint64_t const sizes[2] = {static_cast<uint64_t>(descriptor.matrix.columns), static_cast<uint64_t>(descriptor.matrix.rows)};
    uint64_t const strides[1] = {sizes[0] * descriptor.element_bytes};
    uint32_t const box[2] = {descriptor.box[1], descriptor.box[0]};
    uint32_t const steps[2] = {1, 1};
    int const status = driver.tensorMapEncodeTiled(&map, descriptor.element, 2, reinterpret_cast<void*>(address), sizes, strides, box,
        steps, 0, descriptor.swizzle, kPromoteTo128Bytes, 0);
    driver.check(status, ("cuTensorMapEncodeTiled for " + kernel).c_str());
    return map;
}

} // namespace

void add_launch(Launches& launches, std::string const& op, Kernel const& kernel, Grid const& grid, Arguments const& own,
    Arguments const& of_call, std::map<std::string, Matrix> const& matrices)
{
    if (grid[0] < 0 || grid[1] < 0 || grid[2] < 0 || grid[0] > kMaxGridX || grid[1] > kMaxGrid || grid[2] > kMaxGrid)
        fail(op, ": kernel ", kernel.name, " would need a grid of ", grid[0], " x ", grid[1], " x ", grid[2],
            ". Lower the batch or the tokens of a call.");
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)
        return; // an empty tensor: nothing to compute
    if (grid[0] % kernel.cluster != 0)
        fail(op, ": kernel ", kernel.name, " has clusters of ", kernel.cluster, " blocks, of which ", grid[0],
            " are no multiple. Compile the archive again.");
    Launch launch;
    launch.name = kernel.name;
    launch.function = load_function(kernel);
    for (size_t i = 0; i < 3; ++i)
        launch.grid[i] = static_cast<unsigned>(grid[i]);
    launch.threads = kernel.threads;
    launch.shared_bytes = kernel.shared_bytes;
    for (KernelArgument const& argument : kernel.arguments)
    {
        std::string const& name = argument.name;
        std::string const& type = argument.type;
        Argument const* const first = find(own, name);
        Argument const* const value = first ? first : find(of_call, name);
        if (!value)
            fail(op, ": kernel ", kernel.name, " takes ", name, ", which the launch plan does not pass. Compile the archive again.");
        bool const integer = value->kind == Argument::Kind::kInteger;
        bool const real = value->kind == Argument::Kind::kFloat;
        bool const described = type == "descriptor";
        if ((integer || real) == (type == "ptr" || described) || real != (type == "f32"))
            fail(op, ": kernel ", kernel.name, " takes ", name, " as ", type,
                "; the launch plan passes something else. Compile the archive again.");
        launch.arguments.push_back(*value);
        launch.values.push_back(integer || real ? bits(kernel.name, name, type, *value) : 0);
        if (!described)
            continue;
        Matrix const* const sizes = find(matrices, name);
        if (!sizes)
            fail(op, ": kernel ", kernel.name, " takes the descriptor ", name, ", of which the launch plan has no matrix. ",
                "Compile the archive again.");
        launch.descriptors.push_back(describe(kernel, argument, *sizes));
        launch.descriptors.back().argument = launch.arguments.size() - 1;
        std::pair<char const*, int64_t> const more[] = {{"i32", sizes->rows}, {"i32", sizes->columns}, {"i64", sizes->columns}, {"i64", 1}};
        for (auto const& [kind, size] : more)
        {
            launch.arguments.push_back({Argument::Kind::kInteger, 0, size, 0.0});
            launch.values.push_back(bits(kernel.name, name, kind, launch.arguments.back()));
        }
    }
    launch.arguments.resize(launch.arguments.size() + kernel.trailing_nulls);
    launch.values.resize(launch.values.size() + kernel.trailing_nulls);
    launches.all.push_back(std::move(launch));
}

void add_copy(Launches& launches, Argument target, Argument source, size_t bytes)
{
    if (bytes == 0 || target.kind == Argument::Kind::kNull)
        return;
    Launch launch;
    launch.kind = Launch::Kind::kCopy;
    launch.name = "copy";
    launch.arguments = {target, source};
    launch.bytes = bytes;
    launches.all.push_back(std::move(launch));
}

void forget_functions()
{
    std::lock_guard<std::mutex> const lock(sMutex);
    loaded().clear();
}

CuFunction load_function(Kernel const& kernel)
{
    Driver& driver = Driver::get();
    uint64_t const context = current_context();
    std::lock_guard<std::mutex> const lock(sMutex);
    CuFunction& function = loaded()[{context, kernel.cubin.data()}];
    if (function)
        return function;
    CuModule module = nullptr;
    CuFunction found = nullptr;
    int const loaded = driver.moduleLoadData(&module, kernel.cubin.data());
    if (loaded == kInvalidImage || loaded == kNoBinary || loaded == kNewerCompiler)
    {
        int version = 0;
        if (driver.driverGetVersion)
            driver.driverGetVersion(&version);
        fail("the CUDA driver", version ? " (CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) + ")" : "",
            " does not take the kernel ", kernel.name, " (error ", loaded, "): it is older than what compiled it, or the GPU is another one. ",
            "Update the driver, or export again here.");
    }
    driver.check(loaded, "cuModuleLoadData");
    driver.check(driver.moduleGetFunction(&found, module, kernel.symbol.c_str()), "cuModuleGetFunction");
    if (kernel.shared_bytes > kDefaultSharedBytes)
    {
        int const status = driver.funcSetAttribute(found, kMaxDynamicSharedBytes, static_cast<int>(kernel.shared_bytes));
        if (status != 0)
            fail("kernel ", kernel.name, " needs ", kernel.shared_bytes,
                " bytes of shared memory, more than this GPU gives (CUDA error ", status, ").");
    }
    // Load the code now: with lazy loading it would load at the first launch, which may be under capture.
    if (driver.funcLoad)
        driver.check(driver.funcLoad(found), "cuFuncLoad");
    function = found;
    return function;
}

void run(Launches const& launches, void const* const* inputs, void* const* outputs, void* workspace, CuDevicePtr persistent,
    CuStream stream)
{
    Driver& driver = Driver::get();
    auto const address = [&](Argument const& argument) -> uint64_t {
        switch (argument.kind)
        {
        case Argument::Kind::kInput: return reinterpret_cast<uint64_t>(inputs[argument.index]);
        case Argument::Kind::kOutput: return reinterpret_cast<uint64_t>(outputs[argument.index]);
        case Argument::Kind::kWorkspace: return reinterpret_cast<uint64_t>(workspace) + argument.index;
        case Argument::Kind::kPersistent: return persistent + argument.index;
        default: return 0;
        }
    };
    std::vector<uint64_t> values;
    std::vector<void*> pointers;
    std::vector<TensorMap> maps;
    for (Launch const& launch : launches.all)
    {
        if (launch.kind == Launch::Kind::kCopy)
        {
            uint64_t const target = address(launch.arguments[0]);
            uint64_t const source = address(launch.arguments[1]);
            if (target != source)
                driver.check(driver.memcpyDtoDAsync(target, source, launch.bytes, stream), "cuMemcpyDtoDAsync");
            continue;
        }
        values = launch.values;
        pointers.resize(values.size());
        for (size_t i = 0; i < values.size(); ++i)
        {
            Argument::Kind const kind = launch.arguments[i].kind;
            if (kind != Argument::Kind::kInteger && kind != Argument::Kind::kFloat)
                values[i] = address(launch.arguments[i]);
            pointers[i] = &values[i];
        }
        maps.clear();
        for (Descriptor const& descriptor : launch.descriptors)
            maps.push_back(encode(descriptor, values[descriptor.argument], launch.name));
        for (size_t i = 0; i < maps.size(); ++i)
            pointers[launch.descriptors[i].argument] = &maps[i];
        int const status = driver.launchKernel(launch.function, launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1,
            launch.shared_bytes, stream, pointers.data(), nullptr);
        driver.check(status, ("cuLaunchKernel of " + launch.name).c_str());
    }
}

} // namespace still
