// TensorRT 10.3 to 11: IPluginV3 over the core. TensorRT is not linked: load the library with the plugin registry's
// load_library, trtexec's --dynamicPlugins, or build the static-registration variant for hosts that only dlopen.
#include "register.h"

namespace still
{
namespace
{

using namespace nvinfer1;

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuildV2, public IPluginV3OneRuntime
{
public:
    explicit Plugin(NodeOp const& node)
        : mNode(node), mVersion(std::to_string(node.op().spec().version)), mStored(stored(node.op(), node.activation_type())),
          mField(kStored, mStored.data(), PluginFieldType::kCHAR, static_cast<int32_t>(mStored.size())), mFields{1, &mField}
    {
    }

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override
    {
        switch (type)
        {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    IPluginV3* clone() noexcept override { return copy(); }
    char const* getPluginName() const noexcept override { return mNode.op().spec().name.c_str(); }
    char const* getPluginVersion() const noexcept override { return mVersion.c_str(); }
    char const* getPluginNamespace() const noexcept override { return mNode.op().spec().domain.c_str(); }

    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(mNode.op().outputs().size()); }

    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t count, DynamicPluginTensorDesc const*, int32_t) noexcept override
    {
        return logged(1, [&] {
            mNode.op().infer(largest(inputs, count)); // refuse an invalid graph while building
            return 0;
        });
    }

    int32_t getOutputDataTypes(DataType* outputs, int32_t count, DataType const* inputs, int32_t) const noexcept override
    {
        return logged(1, [&] {
            for (int32_t i = 0; i < count; ++i)
                outputs[i] = mNode.output_type(i, inputs);
            return 0;
        });
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t given, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t count,
        IExprBuilder& builder) noexcept override
    {
        return logged(1, [&] {
            if (static_cast<size_t>(given) != mNode.op().inputs().size())
                fail(getPluginName(), ": expected ", mNode.op().inputs().size(), " inputs, got ", given, ".");
            for (int32_t i = 0; i < count; ++i)
                outputs[i] = mNode.output_shape(i, inputs, builder);
            return 0;
        });
    }

    bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t, int32_t) noexcept override
    {
        return logged(false, [&] {
            auto const& desc = tensors[position].desc;
            return desc.format == TensorFormat::kLINEAR
                && mNode.accepts(position, desc.type, tensors[mNode.first_activation()].desc.type);
        });
    }

    size_t getWorkspaceSize(
        DynamicPluginTensorDesc const* inputs, int32_t count, DynamicPluginTensorDesc const*, int32_t) const noexcept override
    {
        return logged(size_t{0}, [&] { return mNode.op().workspace_bytes(largest(inputs, count)); });
    }

    // If the state is declared as aliased, TensorRT copies it once more per layer (seen in TensorRT-Edge-LLM). Runners bind past
    // and present to one address instead, which the kernels allow.
    int32_t getAliasedInput(int32_t) noexcept override { return -1; }

    int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t count, PluginTensorDesc const*, int32_t) noexcept override
    {
        return logged(1, [&] {
            mNode.prepare(inputs, count);
            return 0;
        });
    }

    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) noexcept override
    {
        return logged(1, [&] {
            mNode.op().launch(inputs, outputs, workspace, stream);
            return 0;
        });
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return copy(); }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &mFields; }

private:
    std::vector<Tensor> largest(DynamicPluginTensorDesc const* descs, int32_t count) const
    {
        std::vector<Tensor> given;
        for (int32_t i = 0; i < count; ++i)
            given.push_back(to_tensor(descs[i].desc.type, descs[i].max));
        return mNode.tensors(std::move(given));
    }

    Plugin* copy() const noexcept
    {
        return logged(static_cast<Plugin*>(nullptr), [&] { return new Plugin(mNode); });
    }

    NodeOp mNode;
    std::string mVersion;
    std::string mStored;
    PluginField mField;
    PluginFieldCollection mFields;
};

class Creator final : public CreatorOf<IPluginCreatorV3One>
{
public:
    using CreatorOf::CreatorOf;

    IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fields, TensorRTPhase) noexcept override
    {
        return made<Plugin>(name, *fields, [](NodeOp const& node) { return new Plugin(node); });
    }
};

std::vector<IPluginCreatorInterface*> const& creators()
{
    return creators_of_ops<IPluginCreatorInterface, Creator>();
}

} // namespace
} // namespace still

extern "C" STILL_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    count = static_cast<int32_t>(still::creators().size());
    return still::creators().data();
}

STILL_REGISTER_AT_LOAD(still::creators)
