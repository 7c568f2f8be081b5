// A node on the CPU provider: the kernels of ../cpu with ONNX Runtime's threads and memory.
#include <cstdlib>
#include <cstring>
#include <optional>

#include "../cpu/common/instruction_sets.h"
#include "node.h"

namespace still_ort
{
namespace
{

// ONNX Runtime's call, for the kernel.
class OrtCall : public still_cpu::HostCall
{
public:
    OrtCall(still::Op const& op, OrtKernelContext* context, OrtMemoryInfo const* memory, JoinedStates const* joined)
        : HostCall(op.spec()), absent_(op.absent_inputs()), context_(context), memory_(memory), joined_(joined),
          inputs_(op, context, joined)
    {
        tensors.swap(inputs_.tensors);
    }

    void run(void (*task)(void*, size_t), size_t total, void* data) override
    {
        // The only possible failure is a missing thread pool; the tasks then run here.
        if (OrtStatus* const status = g_api->KernelContext_ParallelFor(context_, task, total, 0, data))
        {
            g_api->ReleaseStatus(status);
            for (size_t i = 0; i < total; ++i)
                task(data, i);
        }
    }

    void* output(size_t place, still::Tensor const& tensor) override { return output_of(context_, place, tensor); }

    void* scratch(size_t size_bytes) override
    {
        scratch_.reset();
        OrtAllocator* allocator;
        check(g_api->KernelContext_GetAllocator(context_, memory_, &allocator)); // the host's arena
        auto const give_back = [allocator](void* data)
        {
            if (data)
                allocator->Free(allocator, data);
            g_api->ReleaseAllocator(allocator);
        };
        scratch_ = std::shared_ptr<void>(allocator->Alloc(allocator, size_bytes), give_back);
        if (!scratch_)
            throw Failed("no memory for " + std::to_string(size_bytes >> 20) + " MiB of intermediate results.");
        return scratch_.get();
    }

private:
    void* input_at(size_t place) override { return inputs_.values[place] ? data_of(inputs_.values[place]) : nullptr; }

    void* state_at(size_t past) override
    {
        if (!inputs_.values[past])
            return nullptr;
        // Indices count absent inputs, tensors do not.
        auto const skipped = static_cast<size_t>(__builtin_popcountll(absent_ & ((uint64_t{1} << past) - 1)));
        still::Tensor const& tensor = tensors[past - skipped];
        if (joined_)
            return joined(joined_->at(past), still::type_bytes(tensor.type));
        // States come last, in the same order, among inputs and outputs.
        void* const to = output(spec.outputs.size() - (spec.inputs.size() - past), tensor);
        if (void const* const from = input_at(past); from != to)
            std::memcpy(to, from, tensor.bytes());
        return to;
    }

    // A state in the joined present tensor, which the first access copies from the past.
    void* joined(JoinedStates::Place const& place, size_t element_bytes)
    {
        void*& base = presents_[place.tensor];
        if (!base)
        {
            OrtValue const* const past = inputs_.values[place.input];
            base = like_of(context_, joined_->first_out + place.tensor, past);
            if (void const* const from = data_of(past); from != base)
                std::memcpy(base, from, static_cast<size_t>(inputs_.rows * joined_->sizes[place.tensor]) * element_bytes);
        }
        return static_cast<char*>(base) + static_cast<size_t>(inputs_.rows * place.offset) * element_bytes;
    }

    uint64_t absent_;
    OrtKernelContext* context_;
    OrtMemoryInfo const* memory_;
    JoinedStates const* joined_;
    Inputs inputs_;
    void* presents_[2]{};
    std::shared_ptr<void> scratch_;
};

// STILL_CPU=baseline and the like select an older instruction set, for tests.
int chosen_set()
{
    char const* const asked = std::getenv("STILL_CPU");
    for (int i = 0; asked && i < still_cpu::count_instruction_sets(); ++i)
        if (std::strcmp(asked, still_cpu::instruction_set_name(i)) == 0)
            return i;
    if (asked && *asked)
        still::fail("STILL_CPU=", asked, " is unknown, or this processor cannot run it.");
    return 0;
}

class CpuNode : public Node
{
public:
    CpuNode(still::OpSpec const& spec, still_cpu::Entry const& entry, OrtKernelInfo const* info, bool half, bool joined)
        : joined_(joined ? std::optional(read_joined(spec, info)) : std::nullopt),
          op_(read_op(spec, info, joined_ ? &*joined_ : nullptr)), kernel_(entry.make(op_, half)), instruction_set_(chosen_set())
    {
        OrtMemoryInfo* memory;
        check(g_api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
        memory_.reset(memory);
    }

    void compute(OrtKernelContext* context) override
    {
        OrtCall call(op_, context, memory_.get(), joined_ ? &*joined_ : nullptr);
        call.instruction_set = instruction_set_;
        kernel_->compute(call);
    }

private:
    std::optional<JoinedStates> joined_;
    still::Op op_;
    std::unique_ptr<still_cpu::Kernel> kernel_;
    int instruction_set_;
    std::unique_ptr<OrtMemoryInfo, void (*)(OrtMemoryInfo*)> memory_{nullptr, g_api->ReleaseMemoryInfo};
};

} // namespace

std::unique_ptr<Node> make_cpu_node(
    still_cpu::Entry const& entry, still::OpSpec const& spec, OrtKernelInfo const* info, bool half, bool joined)
{
    return std::make_unique<CpuNode>(spec, entry, info, half, joined);
}

} // namespace still_ort
