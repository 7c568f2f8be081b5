// still::Experts: from a call's shapes to the layer that the kernels know.
#include "node.h"

namespace still_cpu
{
namespace
{

class Node : public experts::Node
{
public:
    Node(still::Op const& op, bool half) : experts::Node(op, half)
    {
        expect_inputs(op.spec(), {"input", "expert", "weight", "gate_up", "down"});
    }

private:
    experts::Layer read_layer(still::Call const& call) const override
    {
        experts::Layer layer{};
        layer.gate_up.inputs = dimension(call, "I", 1, kMostSize), layer.down.inputs = dimension(call, "M", 1, kMostSize);
        return layer;
    }

    void read_matrices(HostCall& call, experts::Tensors& x) const override
    {
        x.gate_up.values = call.input(3), x.down.values = call.input(4);
    }
};

} // namespace

Entry experts_entry()
{
    return entry_of<Node>("Experts");
}

} // namespace still_cpu
