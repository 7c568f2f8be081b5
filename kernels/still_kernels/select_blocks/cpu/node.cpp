// still::SelectBlocks: converts a call's shapes and a node's attributes to the kernels' layer.
#include "core/error.h"
#include "cpu/common/kernel.h"
#include "select_blocks.h"

#include <algorithm>
#include <limits>

namespace still_cpu
{
namespace
{

using select::Layer;

class Node : public LayerKernel<Layer>
{
public:
    Node(still::Op const& op, bool half)
        : LayerKernel(op, half),
          layer_{0, 0, 0, 0, half, integer(op, "block_size", 1), integer(op, "mean_stride", 1), integer(op, "mean_length", 1),
              integer(op, "lse_stride", 1), integer(op, "lse_length", 1), integer(op, "top_blocks", 1), integer(op, "init_blocks", 0),
              integer(op, "local_blocks", 0), integer(op, "dense_length", 1), integer(op, "block_slots", 1),
              integer(op, "switch_by_call", 0)}
    {
        Layer const& l = layer_; // the same checks as `fault_of` of the OpSpec, which exports use
        if (l.block % l.stride || l.length % l.stride || l.lse_stride % l.stride || l.lse_length % l.lse_stride
            || l.top < l.first + l.local + 1 || l.dense < l.lse_length || l.slots < std::max(l.top, (l.dense - 2) / l.block + 1))
            still::fail("SelectBlocks: the node's attributes do not fit each other. Export the model anew.");
    }

private:
    Layer read_layer(still::Call const& call) const override
    {
        check_heads(call);
        Layer layer = layer_;
        layer.heads = dimension(call, "H"), layer.kv_heads = dimension(call, "HK"), layer.dim = dimension(call, "D");
        layer.rows = dimension(call, "N", 0, std::numeric_limits<int32_t>::max());
        return layer;
    }

    void run(HostCall& call, Sizes const& sizes, void* output) override
    {
        int64_t const *const past = call.counts("past_length"), *const brought = call.counts("new_tokens");
        check_rows(op_.spec(), sizes.batch, past, brought, sizes.tokens, sizes.layer.rows * layer_.stride);
        select::Tensors const x{call.input("query"), call.input("key"), static_cast<int32_t*>(output), call.state<float>("past_key_sum"),
            sizes.tokens};
        select::select_blocks(sizes.layer, x, sizes.batch, past, brought, call);
    }

    Layer const layer_;
};

} // namespace

Entry select_blocks_entry()
{
    return entry_of<Node>("SelectBlocks");
}

} // namespace still_cpu
