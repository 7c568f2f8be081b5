// TensorRT 8.6 (JetPack 6.0, DRIVE): IPluginV2DynamicExt over the core. TensorRT is not linked: load the library with the
// plugin registry's load_library, or build the static-registration variant for hosts that only dlopen.
#include "register.h"

#include <cstring>

namespace still
{
namespace
{

using namespace nvinfer1;

class Plugin final : public IPluginV2DynamicExt
{
public:
    Plugin(NodeOp const& node, std::string const& space)
        : mNode(node), mNamespace(space), mVersion(std::to_string(node.op().spec().version)),
          mBytes(stored(node.op(), node.activation_type()))
    {
    }

    IPluginV2DynamicExt* clone() const noexcept override
    {
        return logged(static_cast<IPluginV2DynamicExt*>(nullptr), [&] { return new Plugin(mNode, mNamespace); });
    }

    char const* getPluginType() const noexcept override { return mNode.op().spec().name.c_str(); }
    char const* getPluginVersion() const noexcept override { return mVersion.c_str(); }
    void setPluginNamespace(char const* name) noexcept override { mNamespace = name; }
    char const* getPluginNamespace() const noexcept override { return mNamespace.c_str(); }
    void destroy() noexcept override { delete this; }
    size_t getSerializationSize() const noexcept override { return mBytes.size(); }
    void serialize(void* buffer) const noexcept override { std::memcpy(buffer, mBytes.data(), mBytes.size()); }

    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(mNode.op().outputs().size()); }

    DataType getOutputDataType(int32_t index, DataType const* inputs, int32_t) const noexcept override
    {
        return mNode.output_type(index, inputs);
    }

    DimsExprs getOutputDimensions(int32_t index, DimsExprs const* inputs, int32_t count, IExprBuilder& builder) noexcept override
    {
        return logged(DimsExprs{-1, {}}, [&] {
            if (static_cast<size_t>(count) != mNode.op().inputs().size())
                fail(getPluginType(), ": expected ", mNode.op().inputs().size(), " inputs, got ", count, ".");
            return mNode.output_shape(index, inputs, builder);
        });
    }

    bool supportsFormatCombination(int32_t position, PluginTensorDesc const* tensors, int32_t, int32_t) noexcept override
    {
        return logged(false, [&] {
            return tensors[position].format == TensorFormat::kLINEAR
                && mNode.accepts(position, tensors[position].type, tensors[mNode.first_activation()].type);
        });
    }

    // Called while building (dimensions unknown) and when shapes of an execution context change (known), which prepares the launches.
    void configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t count, DynamicPluginTensorDesc const*, int32_t) noexcept override
    {
        std::vector<PluginTensorDesc> descs;
        for (int32_t i = 0; i < count; ++i)
        {
            descs.push_back(inputs[i].desc);
            for (int32_t axis = 0; axis < inputs[i].desc.dims.nbDims; ++axis)
                if (inputs[i].desc.dims.d[axis] < 0)
                    return;
        }
        logged(false, [&] {
            mNode.prepare(descs.data(), count);
            return true;
        });
    }

    size_t getWorkspaceSize(PluginTensorDesc const* inputs, int32_t count, PluginTensorDesc const*, int32_t) const noexcept override
    {
        return logged(size_t{0}, [&] { return mNode.op().workspace_bytes(mNode.tensors(inputs, count)); });
    }

    // Shapes are unknown here. Load everything that the attributes allow, so that enqueue never loads a module.
    int32_t initialize() noexcept override
    {
        return logged(1, [&] {
            mNode.preload();
            return 0;
        });
    }

    void terminate() noexcept override {}

    int32_t enqueue(PluginTensorDesc const* descs, PluginTensorDesc const*, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) noexcept override
    {
        return logged(1, [&] {
            mNode.prepare(descs, static_cast<int32_t>(mNode.op().inputs().size())); // does nothing after configurePlugin
            mNode.op().launch(inputs, outputs, workspace, stream);
            return 0;
        });
    }

private:
    NodeOp mNode;
    std::string mNamespace;
    std::string mVersion;
    std::string mBytes;
};

class Creator final : public CreatorOf<IPluginCreator>
{
public:
    explicit Creator(OpSpec const& spec) : CreatorOf(spec), mNamespace(spec.domain) {}

    void setPluginNamespace(char const* name) noexcept override { mNamespace = name; }
    char const* getPluginNamespace() const noexcept override { return mNamespace.c_str(); }

    IPluginV2* createPlugin(char const* name, PluginFieldCollection const* fields) noexcept override
    {
        return plugin(name, *fields);
    }

    IPluginV2* deserializePlugin(char const* name, void const* data, size_t size) noexcept override
    {
        return plugin(name, std::string_view(static_cast<char const*>(data), size));
    }

private:
    template <class Source> IPluginV2* plugin(char const* name, Source const& from) const noexcept
    {
        return made<Plugin>(name, from, [&](NodeOp const& node) { return new Plugin(node, mNamespace); });
    }

    std::string mNamespace;
};

std::vector<IPluginCreator*> const& creators()
{
    return creators_of_ops<IPluginCreator, Creator>();
}

} // namespace
} // namespace still

extern "C" STILL_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count)
{
    count = static_cast<int32_t>(still::creators().size());
    return still::creators().data();
}

STILL_REGISTER_AT_LOAD(still::creators)
