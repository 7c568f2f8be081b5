// A node on the CUDA provider: the core's launches on ONNX Runtime's stream, in its memory.
#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "../core/driver.h"
#include "../core/launches.h"
#include "node.h"

namespace still_ort
{
namespace
{

constexpr size_t kRemembered = 8; // kinds of calls: prefill and decode, at some state sizes
constexpr uintptr_t kAlignment = 16;

// Launches and outputs for given shapes.
struct Prepared
{
    std::vector<still::Tensor> inputs;
    std::vector<still::Tensor> outputs;
    still::Launches launches;
};

class CudaNode : public Node
{
public:
    CudaNode(still::OpSpec const& spec, OrtKernelInfo const* info, still::Type activation) : op_(read_op(spec, info))
    {
        for (still::TensorSpec const* output : op_.outputs())
            places_.push_back(static_cast<size_t>(
                std::find_if(spec.outputs.begin(), spec.outputs.end(), [&](auto const& o) { return o.name == output->name; })
                - spec.outputs.begin()));
        op_.preload(activation); // before any CUDA graph captures; also refuses an op without kernels
        OrtAllocator* allocator;
        check(g_api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator));
        allocator_.reset(allocator);
    }

    void compute(OrtKernelContext* context) override
    {
        Inputs const inputs(op_, context);
        std::shared_ptr<Prepared const> const call = prepared(inputs.tensors);
        std::vector<void const*> in;
        std::vector<void*> out;
        for (OrtValue const* value : inputs.values)
            if (value)
                in.push_back(aligned(data_of(value)));
        for (size_t i = 0; i < places_.size(); ++i)
            out.push_back(const_cast<void*>(aligned(output_of(context, places_[i], call->outputs[i]))));
        void* stream;
        check(g_api->KernelContext_GetGPUComputeStream(context, &stream));
        OrtMemoryInfo const* where;
        void* workspace;
        check(g_api->AllocatorGetInfo(allocator_.get(), &where));
        check(g_api->KernelContext_GetScratchBuffer(context, where, call->launches.workspace_bytes, &workspace)); // null for 0 bytes
        // Freed as soon as the launches are on the stream; the provider's arena then reuses it only on this stream.
        auto const give_back = [this](void* data) { allocator_->Free(allocator_.get(), data); };
        std::unique_ptr<void, decltype(give_back)> const scratch(workspace, give_back);
        still::CuDevicePtr const zeroed = call->launches.persistent_bytes ? persistent(stream, call->launches.persistent_bytes) : 0;
        still::run(call->launches, in.data(), out.data(), workspace, zeroed, stream);
    }

private:
    // Cached, since steps are alike; several threads may run a session.
    std::shared_ptr<Prepared const> prepared(std::vector<still::Tensor> const& tensors)
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        for (auto& known : known_)
            if (known->inputs == tensors)
                return known;
        if (known_.size() == kRemembered)
            known_.pop_back();
        return known_.emplace_front(std::make_shared<Prepared const>(Prepared{tensors, op_.infer(tensors), op_.launches(tensors)}));
    }

    // Memory that every launch leaves zero. Two streams must not share it, and its address is constant, because CUDA graphs store it.
    still::CuDevicePtr persistent(void* stream, size_t size)
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        auto& blocks = persistent_[{still::current_context(), stream}];
        if (blocks.empty() || blocks.back().bytes() < size)
            blocks.emplace_back(size);
        return blocks.back().address();
    }

    void const* aligned(void const* address) const
    {
        if (reinterpret_cast<uintptr_t>(address) % kAlignment)
            still::fail(op_.spec().name, ": a tensor does not begin at a multiple of ", kAlignment, " bytes. Bind whole buffers.");
        return address;
    }

    still::Op op_;
    std::vector<size_t> places_; // of the existing outputs, in the OpSpec
    std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_{nullptr, g_api->ReleaseAllocator};
    std::mutex mutex_;
    std::deque<std::shared_ptr<Prepared const>> known_;                                // newest first
    std::map<std::pair<uint64_t, void*>, std::deque<still::ZeroedMemory>> persistent_; // by context and stream
};

} // namespace

std::unique_ptr<Node> make_cuda_node(still::OpSpec const& spec, OrtKernelInfo const* info, still::Type activation)
{
    return std::make_unique<CudaNode>(spec, info, activation);
}

} // namespace still_ort
