// still::LowRankMatMul: converts a call's shapes to the kernels' layer.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "cpu/common/scratch.h"
#include "low_rank_matmul.h"

#include <algorithm>

namespace still_cpu
{
namespace
{

using namespace low_rank;

constexpr size_t kLanes = 16; // most useful threads

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half) : LayerKernel(op, half) {}

private:
    Layer read_layer(still::Call const& call) const override
    {
        constexpr int64_t most = 1 << 24;
        Layer const layer{dimension(call, "I", 1, most), dimension(call, "R"), dimension(call, "O", 1, most), half_};
        // Weights of other ops may have a dimension of 1 for all heads.
        if (int64_t const own = call.tensor("inner").dims[0]; own != layer.inputs)
            still::fail("LowRankMatMul: inner has ", own, " inputs; expected ", layer.inputs, ".");
        if (int64_t const own = call.tensor("outer").dims[0]; own != layer.rank)
            still::fail("LowRankMatMul: outer has a rank of ", own, "; expected ", layer.rank, ".");
        return layer;
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        Tensors const x{call.input("input"), call.input("inner"), call.input("outer"), call.input("base"), output, sizes.all};
        Kernels const& kernels = kernels_of(call.instruction_set, numbers(half_));
        auto const tasks = static_cast<size_t>((x.tokens + kTokens - 1) / kTokens);
        size_t const lanes = std::min(kLanes, tasks);
        Rooms rooms;
        Scratch const scratch(call, [&](Scratch& from) { rooms = from.take_rooms(lanes, kernels.room(sizes.layer)); });
        spread(call, lanes, tasks,
            [&](size_t i, size_t lane)
            {
                int64_t const token = static_cast<int64_t>(i) * kTokens;
                auto const count = static_cast<int>(std::min<int64_t>(kTokens, x.tokens - token));
                kernels.multiply({&sizes.layer, &x, token, count, rooms.of(lane)});
            });
    }
};

} // namespace

Entry low_rank_matmul_entry()
{
    return entry_of<Node>("LowRankMatMul");
}

} // namespace still_cpu
