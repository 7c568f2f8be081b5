// still::Attention: from a call's shapes to the layer that the kernels know.
#include "node.h"

namespace still_cpu
{
namespace
{

class Node : public softmax::Node
{
public:
    Node(still::Op const& op, bool half)
        : softmax::Node(op, half, 3,
              {"query", "key", "value", "new_tokens", "past_length", "past_key", "past_value", "past_key_scale", "past_value_scale"})
    {
    }

private:
    softmax::Layer read_layer(still::Call const& call) const override
    {
        softmax::Layer layer = softmax::Node::read_layer(call);
        layer.cache = cache_of(call, half_);
        return layer;
    }

    void read_tensors(HostCall& call, softmax::Tensors& x) const override
    {
        x.key_cache = call.kept(5, 7), x.value_cache = call.kept(6, 8);
    }
};

} // namespace

Entry attention_entry()
{
    return entry_of<Node>("Attention");
}

} // namespace still_cpu
