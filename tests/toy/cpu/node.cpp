// still::Decay on the CPU: one pass over the tokens of each row.
#include "core/error.h"
#include "cpu/common/kernel.h"

namespace still_cpu
{
namespace
{

class Node : public LayerKernel<int64_t> // a layer is its width, H * D
{
public:
    Node(still::Op const& op, bool half) : LayerKernel(op, half), decay_(static_cast<float>(op.attributes().at("decay").real))
    {
        if (half)
            still::fail("Decay: this kernel has float32 only.");
    }

private:
    int64_t read_layer(still::Call const& call) const override { return int64_t{dimension(call, "H")} * dimension(call, "D"); }

    void run(HostCall& call, Sizes const& sizes, void* made) override
    {
        int64_t const width = sizes.layer, *const past = call.counts("past_length"), *const brought = call.counts("new_tokens");
        check_rows(op_.spec(), sizes.batch, past, brought, sizes.tokens);
        auto const* value = call.input<float>("value");
        auto *output = static_cast<float*>(made), *total = call.state<float>("past_total");
        for (int row = 0; row < sizes.batch; ++row, total += width)
            for (int64_t token = 0; token < sizes.tokens; ++token, value += width, output += width)
                for (int64_t i = 0; i < width; ++i)
                    output[i] = token < brought[row] ? total[i] = decay_ * total[i] + value[i] : 0.0f;
    }

    float decay_;
};

} // namespace

Entry toy_entry()
{
    return entry_of<Node>("Decay");
}

} // namespace still_cpu
