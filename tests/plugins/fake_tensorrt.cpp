// Stands for TensorRT: loads a plugin library and calls it in the order in which a builder and a runtime do. Prints what came back.
// Usage: fake_tensorrt LIBRARY OP FIRST_STATE ARGUMENT... (stand_in.h)
#include "stand_in.h"

#include <NvInfer.h>

#include <array>
#include <deque>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace
{

StandIn gCall;

DataType type_of(char letter) { return letter == 'h' ? DataType::kHALF : letter == 'f' ? DataType::kFLOAT : DataType::kINT32; }

struct Given
{
    std::deque<std::string> names, texts;
    std::deque<int32_t> integers;
    std::deque<float> reals;
    std::vector<PluginField> fields;

    void add(Attribute const& attribute)
    {
        names.push_back(attribute.name);
        switch (attribute.kind)
        {
        case 'i':
            integers.push_back(std::atoi(attribute.value.c_str()));
            fields.emplace_back(names.back().c_str(), &integers.back(), PluginFieldType::kINT32, 1);
            break;
        case 'f':
            reals.push_back(static_cast<float>(std::atof(attribute.value.c_str())));
            fields.emplace_back(names.back().c_str(), &reals.back(), PluginFieldType::kFLOAT32, 1);
            break;
        default: // TensorRT's parser counts the trailing NUL
            texts.push_back(attribute.value);
            fields.emplace_back(names.back().c_str(), texts.back().c_str(), PluginFieldType::kCHAR,
                static_cast<int32_t>(attribute.value.size() + 1));
        }
    }
    PluginFieldCollection collection() const { return {static_cast<int32_t>(fields.size()), fields.data()}; }
};

std::vector<Shape> inputs(int tokens) { return gCall.inputs_of(tokens); }
std::vector<Shape> outputs(int tokens) { return gCall.outputs_of(tokens); }

Dims dims(std::vector<int> const& sizes)
{
    Dims result{};
    result.nbDims = static_cast<int32_t>(sizes.size());
    for (size_t a = 0; a < sizes.size(); ++a)
        result.d[a] = sizes[a];
    return result;
}

std::vector<PluginTensorDesc> descs(std::vector<Shape> const& shapes)
{
    std::vector<PluginTensorDesc> result;
    for (auto const& shape : shapes)
    {
        PluginTensorDesc desc{};
        desc.dims = dims(shape.dims);
        desc.type = type_of(shape.type);
        desc.format = TensorFormat::kLINEAR;
        result.push_back(desc);
    }
    return result;
}

std::vector<DynamicPluginTensorDesc> dynamic(std::vector<Shape> const& shapes, bool known)
{
    std::vector<DynamicPluginTensorDesc> result;
    for (auto const& desc : descs(shapes))
    {
        DynamicPluginTensorDesc item{};
        item.desc = desc;
        item.min = item.max = desc.dims;
        if (!known)
            item.desc.dims.d[0] = -1;
        result.push_back(item);
    }
    return result;
}

// Dimension expressions are only passed on, so numbers dressed as pointers will do: places, and constants behind them.
constexpr size_t kConstants = size_t{1} << 20;

IDimensionExpr const* expression(size_t tensor, size_t axis) { return reinterpret_cast<IDimensionExpr const*>(16 * (tensor + 1) + axis); }

std::vector<DimsExprs> expressions(std::vector<Shape> const& shapes)
{
    std::vector<DimsExprs> result;
    for (size_t t = 0; t < shapes.size(); ++t)
    {
        DimsExprs item{};
        item.nbDims = static_cast<int32_t>(shapes[t].dims.size());
        for (size_t a = 0; a < shapes[t].dims.size(); ++a)
            item.d[a] = expression(t, a);
        result.push_back(item);
    }
    return result;
}

void print_shape(size_t output, DimsExprs const& shape)
{
    std::printf("shape %zu:", output);
    for (int a = 0; a < shape.nbDims; ++a)
    {
        auto const place = reinterpret_cast<size_t>(shape.d[a]);
        if (place >= kConstants)
            std::printf(" =%zu", place - kConstants);
        else
            std::printf(" %zu.%zu", place / 16 - 1, place % 16);
    }
    std::printf("\n");
}

struct Pointers
{
    std::vector<void const*> in;
    std::vector<void*> out;
    Pointers()
    {
        for (size_t i = 0; i < inputs(1).size(); ++i)
            in.push_back(reinterpret_cast<void const*>(0x1000 * (i + 1)));
        size_t const plain = std::max<size_t>(gCall.outputs.size(), 1);
        for (size_t i = 0; i < outputs(1).size(); ++i)
            out.push_back(reinterpret_cast<void*>(i >= plain ? 0x1000 * (i - plain + 1 + gCall.first_state) : 0x900000 + 0x10000 * i));
    }
};

struct Expressions final : apiv::VExprBuilder
{
#if NV_TENSORRT_MAJOR >= 10
    IDimensionExpr const* constant(int64_t value) override
#else
    IDimensionExpr const* constant(int32_t value) override
#endif
    {
        return reinterpret_cast<IDimensionExpr const*>(kConstants + static_cast<size_t>(value));
    }
    IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override { return nullptr; }
#if NV_TENSORRT_MAJOR >= 10
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override { return nullptr; }
#endif
};

struct Builder final : IExprBuilder
{
    Builder() { mImpl = &expressions; }
    Expressions expressions;
};

IExprBuilder& builder()
{
    static Builder made;
    return made;
}

// The creator of the op that was asked for.
template <typename Creator, typename Interface>
Creator* named(Interface* const* creators, int32_t& count)
{
    for (int32_t i = 0; i < count; ++i)
        if (auto* const creator = static_cast<Creator*>(creators[i]); gCall.op == creator->getPluginName())
            return creator;
    require(false, "a creator of the op");
    return nullptr;
}

class Logger final : public ILogger
{
    void log(Severity, char const* text) noexcept override { std::printf("logged %s\n", text); }
} gLogger;

class Finder final : public ILoggerFinder
{
    ILogger* findLogger() override { return &gLogger; }
} gFinder;

} // namespace

#if NV_TENSORRT_MAJOR >= 10

void run(void* library, PluginFieldCollection const& fields)
{
    auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*) (int32_t&)>(dlsym(library, "getCreators"));
    require(get != nullptr, "getCreators");
    int32_t count = 0;
    auto* const creator = named<IPluginCreatorV3One>(get(count), count);
    std::printf("creator %d %s %s %s fields %d\n", count, creator->getPluginNamespace(), creator->getPluginName(),
        creator->getPluginVersion(), creator->getFieldNames()->nbFields);
    auto* made = creator->createPlugin("node", &fields, TensorRTPhase::kBUILD);
    require(made != nullptr, "createPlugin");
    auto* build = static_cast<IPluginV3OneBuildV2*>(made->getCapabilityInterface(PluginCapabilityType::kBUILD));
    auto const in = inputs(150);
    auto const out = outputs(150);
    auto const nbIn = static_cast<int32_t>(in.size());
    auto const nbOut = static_cast<int32_t>(out.size());
    require(build->getNbOutputs() == nbOut, "getNbOutputs");
    std::vector<DataType> types, results(out.size());
    for (auto const& shape : in)
        types.push_back(type_of(shape.type));
    require(build->getOutputDataTypes(results.data(), nbOut, types.data(), nbIn) == 0, "getOutputDataTypes");
    for (size_t i = 0; i < out.size(); ++i)
        require(results[i] == type_of(out[i].type), "output type");
    std::vector<DimsExprs> shapes(out.size());
    require(build->getOutputShapes(expressions(in).data(), nbIn, nullptr, 0, shapes.data(), nbOut, builder()) == 0, "getOutputShapes");
    for (size_t i = 0; i < shapes.size(); ++i)
        print_shape(i, shapes[i]);
    auto all = dynamic(in, false);
    for (auto const& item : dynamic(out, false))
        all.push_back(item);
    for (int32_t p = 0; p < nbIn + nbOut; ++p)
    {
        require(build->supportsFormatCombination(p, all.data(), nbIn, nbOut), "supportsFormatCombination");
        auto wrong = all;
        wrong[static_cast<size_t>(p)].desc.type = DataType::kINT8;
        require(!build->supportsFormatCombination(p, wrong.data(), nbIn, nbOut), "int8 refused");
        wrong[static_cast<size_t>(p)] = all[static_cast<size_t>(p)];
        wrong[static_cast<size_t>(p)].desc.format = TensorFormat::kCHW32;
        require(!build->supportsFormatCombination(p, wrong.data(), nbIn, nbOut), "format refused");
    }
    auto wide = all;
    wide[0].desc.type = DataType::kFLOAT;
    require(!build->supportsFormatCombination(0, wide.data(), nbIn, nbOut), "activation_type insists");
    require(build->configurePlugin(all.data(), nbIn, all.data() + nbIn, nbOut) == 0, "configurePlugin");
    for (int32_t i = 0; i < nbOut; ++i)
        require(build->getAliasedInput(i) == -1, "getAliasedInput");
    std::printf("workspace %zu\n", build->getWorkspaceSize(all.data(), nbIn, all.data() + nbIn, nbOut));
    auto* runtime = static_cast<IPluginV3OneRuntime*>(made->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    auto const* stored = runtime->getFieldsToSerialize();
    auto* read = creator->createPlugin("node", stored, TensorRTPhase::kRUNTIME);
    require(read != nullptr, "createPlugin at run time");
    auto* attached = static_cast<IPluginV3OneRuntime*>(read->getCapabilityInterface(PluginCapabilityType::kRUNTIME))->attachToContext(nullptr);
    require(attached != nullptr, "attachToContext");
    auto* ready = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    Pointers pointers;
    for (int const tokens : {150, 1})
    {
        auto const now = descs(inputs(tokens));
        auto const then = descs(outputs(tokens));
        require(ready->onShapeChange(now.data(), nbIn, then.data(), nbOut) == 0, "onShapeChange");
        std::printf("enqueue %d\n", ready->enqueue(now.data(), then.data(), pointers.in.data(), pointers.out.data(), reinterpret_cast<void*>(0x7000000), nullptr));
    }
    auto* copy = attached->clone();
    delete attached, delete read, delete made, delete copy;
}

#else

void run(void* library, PluginFieldCollection const& fields)
{
    auto const get = reinterpret_cast<IPluginCreator* const* (*) (int32_t&)>(dlsym(library, "getPluginCreators"));
    require(get != nullptr, "getPluginCreators");
    int32_t count = 0;
    auto* const creator = named<IPluginCreator>(get(count), count);
    std::printf("creator %d %s %s %s fields %d\n", count, creator->getPluginNamespace(), creator->getPluginName(),
        creator->getPluginVersion(), creator->getFieldNames()->nbFields);
    auto* made = static_cast<IPluginV2DynamicExt*>(creator->createPlugin("node", &fields));
    require(made != nullptr, "createPlugin");
    auto const in = inputs(150);
    auto const out = outputs(150);
    auto const nbIn = static_cast<int32_t>(in.size());
    auto const nbOut = static_cast<int32_t>(out.size());
    require(made->getNbOutputs() == nbOut, "getNbOutputs");
    std::vector<DataType> types;
    for (auto const& shape : in)
        types.push_back(type_of(shape.type));
    for (int32_t i = 0; i < nbOut; ++i)
    {
        require(made->getOutputDataType(i, types.data(), nbIn) == type_of(out[static_cast<size_t>(i)].type), "output type");
        print_shape(static_cast<size_t>(i), made->getOutputDimensions(i, expressions(in).data(), nbIn, builder()));
    }
    auto all = descs(in);
    for (auto const& item : descs(out))
        all.push_back(item);
    for (int32_t p = 0; p < nbIn + nbOut; ++p)
    {
        require(made->supportsFormatCombination(p, all.data(), nbIn, nbOut), "supportsFormatCombination");
        auto wrong = all;
        wrong[static_cast<size_t>(p)].type = DataType::kINT8;
        require(!made->supportsFormatCombination(p, wrong.data(), nbIn, nbOut), "int8 refused");
        wrong[static_cast<size_t>(p)] = all[static_cast<size_t>(p)];
        wrong[static_cast<size_t>(p)].format = TensorFormat::kCHW32;
        require(!made->supportsFormatCombination(p, wrong.data(), nbIn, nbOut), "format refused");
    }
    auto wide = all;
    wide[0].type = DataType::kFLOAT;
    require(!made->supportsFormatCombination(0, wide.data(), nbIn, nbOut), "activation_type insists");
    auto const unknown = dynamic(in, false);
    made->configurePlugin(unknown.data(), nbIn, unknown.data(), nbOut);
    std::printf("workspace %zu\n", made->getWorkspaceSize(all.data(), nbIn, all.data() + nbIn, nbOut));
    std::vector<char> stored(made->getSerializationSize());
    made->serialize(stored.data());
    require(creator->deserializePlugin("node", stored.data(), stored.size() - 8) == nullptr, "truncated data refused");
    auto* read = static_cast<IPluginV2DynamicExt*>(creator->deserializePlugin("node", stored.data(), stored.size()));
    require(read != nullptr, "deserializePlugin");
    auto* attached = read->clone();
    require(attached->initialize() == 0, "initialize");
    Pointers pointers;
    for (int const tokens : {150, 1})
    {
        auto const now = descs(inputs(tokens));
        auto const then = descs(outputs(tokens));
        auto const known = dynamic(inputs(tokens), true);
        attached->configurePlugin(known.data(), nbIn, known.data(), nbOut);
        std::printf("enqueue %d\n", attached->enqueue(now.data(), then.data(), pointers.in.data(), pointers.out.data(), reinterpret_cast<void*>(0x7000000), nullptr));
    }
    attached->terminate();
    attached->destroy(), read->destroy(), made->destroy();
}

#endif

int main(int argc, char** argv)
{
    void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        std::printf("FAILED dlopen: %s\n", dlerror());
    require(library != nullptr, "dlopen");
    reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"))(&gFinder);
    gCall.read(argc, argv);
    Given given;
    for (Attribute const& attribute : gCall.attributes)
        given.add(attribute);
    run(library, given.collection());
    given.fields.erase(given.fields.begin()); // the first attribute is missing: must be refused with a log line
#if NV_TENSORRT_MAJOR >= 10
    auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*) (int32_t&)>(dlsym(library, "getCreators"));
    int32_t count = 0;
    auto const fields = given.collection();
    require(!named<IPluginCreatorV3One>(get(count), count)->createPlugin("node7", &fields, TensorRTPhase::kBUILD), "missing attribute refused");
#else
    auto const get = reinterpret_cast<IPluginCreator* const* (*) (int32_t&)>(dlsym(library, "getPluginCreators"));
    int32_t count = 0;
    auto const fields = given.collection();
    require(!named<IPluginCreator>(get(count), count)->createPlugin("node7", &fields), "missing attribute refused");
#endif
    gCall.print_log();
    return 0;
}
