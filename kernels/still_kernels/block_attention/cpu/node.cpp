// still::BlockAttention: from a call's shapes to the layer of softmax attention, whose tokens see chosen blocks.
#include "../../attention/cpu/node.h"

namespace still_cpu
{
namespace
{

class Node : public softmax::Node
{
public:
    Node(still::Op const& op, bool half)
        : softmax::Node(op, half, 4, {"query", "key", "value", "blocks", "new_tokens", "past_length", "past_key", "past_value"}),
          block_size_(integer(op, "block_size", 1))
    {
    }

private:
    softmax::Layer read_layer(still::Call const& call) const override
    {
        softmax::Layer layer = softmax::Node::read_layer(call);
        layer.cache = !half_ && call.kept == still::Type::kFloat16 ? Cache::kHalf : Cache::kAlike;
        layer.block_size = block_size_, layer.slots = dimension(call, "S");
        return layer;
    }

    void read_tensors(HostCall& call, softmax::Tensors& x) const override
    {
        x.blocks = static_cast<int32_t const*>(call.input(3));
        x.key_cache = {call.state(6)}, x.value_cache = {call.state(7)};
    }

    int block_size_;
};

} // namespace

Entry block_attention_entry()
{
    return entry_of<Node>("BlockAttention");
}

} // namespace still_cpu
