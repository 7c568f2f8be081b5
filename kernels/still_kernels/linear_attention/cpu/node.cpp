// still::LinearAttention: converts a call's shapes to the kernels' layer.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "cpu/common/scratch.h"
#include "linear_attention.h"

#include <algorithm>
#include <cmath>
#if defined(STILL_X86)
#include <xmmintrin.h>
#endif

namespace still_cpu
{
namespace linear
{
namespace
{

// Flushes this thread's denormal results to zero during its lifetime. On x86 an instruction with such a number takes some
// hundred cycles, and decaying states fill up with them. Denormal inputs are kept, since half precision has its own.
class NoDenormals
{
public:
#if defined(STILL_X86)
    NoDenormals() : mBefore(_mm_getcsr()) { _mm_setcsr(mBefore | _MM_FLUSH_ZERO_ON); }
    ~NoDenormals() { _mm_setcsr(mBefore); }
#else
    NoDenormals() {} // Arm's cores have no such cost.
#endif
    NoDenormals(NoDenormals const&) = delete;
    NoDenormals& operator=(NoDenormals const&) = delete;

#if defined(STILL_X86)
private:
    unsigned mBefore;
#endif
};

} // namespace

void attention(Layer const& layer, Tensors const& tensors, int batch, int64_t const* brought, Host& host)
{
    Kernels const& kernels = kernels_of(host.instruction_set, numbers(layer.half));
    size_t const heads = static_cast<size_t>(layer.heads), tasks = static_cast<size_t>(batch) * heads;
    size_t const lanes = std::min(kMaxLanes, tasks);
    Rooms rooms;
    Scratch const scratch(host, [&](Scratch& from) { rooms = from.take_rooms(lanes, kernels.room(layer)); });
    auto const run = [&](size_t index, size_t lane)
    {
        NoDenormals const quick;
        int const row = static_cast<int>(index / heads), head = static_cast<int>(index % heads);
        kernels.run({&layer, &tensors, row, head, brought[row], rooms.of(lane)});
    };
    if (tensors.tokens < kLeastChunked)
        spread_evenly(host, lanes, tasks, run);
    else
        spread(host, lanes, tasks, run);
    size_t const element = layer.half ? 2 : 4;
    size_t const token = heads * static_cast<size_t>(layer.shared) * static_cast<size_t>(layer.size) * element;
    clear_ends(tensors.output, batch, tensors.tokens, brought, token);
}

} // namespace linear

namespace
{

using linear::Layer;

// The rules, as the OpSpec lists them.
enum Rule
{
    kLinear,
    kGated,
    kDelta,
    kGatedDelta
};

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : LayerKernel(op, half), rule_(choice(op, "update_rule")), scale_(static_cast<float>(op.attributes().at("scale").real))
    {
    }

private:
    Layer read_layer(still::Call const& call) const override
    {
        Layer layer{dimension(call, "HQ"), dimension(call, "G"), dimension(call, "HK"), dimension(call, "D"), dimension(call, "H"),
            dimension(call, "V"), 0, 0, scale_, half_};
        for (char const* heads : {"HQ", "HK"})
            if (call.size("H") % call.size(heads))
                still::fail("LinearAttention: ", call.size(heads), " heads ", heads, " do not divide the ", call.size("H"), " of value.");
        if (rule_ == kGated || rule_ == kGatedDelta)
            layer.decay = width(call, "E", "D");
        if (rule_ == kDelta || rule_ == kGatedDelta)
            layer.betas = width(call, "W", "H");
        if (layer.scale == 0)
            layer.scale = 1 / std::sqrt(static_cast<float>(layer.dim));
        return layer;
    }

    // 1, or the size of `full`.
    static int width(still::Call const& call, char const* symbol, char const* full)
    {
        if (!call.knows(symbol))
            still::fail("LinearAttention: the rule needs the input that has dimension ", symbol, ".");
        int const found = dimension(call, symbol);
        if (found != 1 && found != dimension(call, full))
            still::fail("LinearAttention: dimension ", symbol, "=", found, "; expected 1 or ", call.size(full), ".");
        return found;
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        int64_t const* const brought = call.counts("new_tokens");
        check_rows(op_.spec(), sizes.batch, nullptr, brought, sizes.tokens);
        linear::Tensors const x{call.input("query"), call.input("key"), call.input("value"), call.input<float>("decay"),
            call.input<float>("beta"), output, call.state<float>("past_recurrent_state"), sizes.tokens};
        if (!x.decay != !sizes.layer.decay || !x.beta != !sizes.layer.betas)
            still::fail("LinearAttention: the rule lacks decay or beta, or has one that it does not use.");
        linear::attention(sizes.layer, x, sizes.batch, brought, call);
    }

    int rule_;
    float scale_;
};

} // namespace

Entry linear_attention_entry()
{
    return entry_of<Node>("LinearAttention");
}

} // namespace still_cpu
