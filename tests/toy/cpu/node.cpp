// still::Decay on the CPU: one pass over the tokens of each row.
#include "core/error.h"
#include "cpu/common/kernel.h"

namespace still_cpu
{
namespace
{

// Places of the inputs.
enum Input
{
    kValue,
    kNewTokens,
    kPastLength,
    kPastTotal
};

struct Sizes
{
    int64_t batch;
    int64_t tokens;
    int64_t width; // H * D
    still::Tensor output;
};

class Node : public Kernel
{
public:
    Node(still::Op const& op, bool half) : op_(op), decay_(static_cast<float>(op.attributes().at("decay").real))
    {
        expect_inputs(op.spec(), {"value", "new_tokens", "past_length", "past_total"});
        if (half)
            still::fail("Decay: this kernel has float32 only.");
    }

    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_.of(op_, call.tensors, [](still::Call const& bound) {
            return Sizes{bound.size("B"), bound.size("T"), int64_t{dimension(bound, "H")} * dimension(bound, "D"), bound.tensor("output")};
        });
        int64_t const *const past = call.counts(kPastLength), *const brought = call.counts(kNewTokens);
        for (int64_t row = 0; row < sizes.batch; ++row)
            check_counts(op_.spec(), static_cast<int>(row), past[row], brought[row], sizes.tokens);
        auto const* value = static_cast<float const*>(call.input(kValue));
        auto* output = static_cast<float*>(call.output(0, sizes.output));
        auto* total = static_cast<float*>(call.state(kPastTotal));
        for (int64_t row = 0; row < sizes.batch; ++row, total += sizes.width)
            for (int64_t token = 0; token < sizes.tokens; ++token, value += sizes.width, output += sizes.width)
                for (int64_t i = 0; i < sizes.width; ++i)
                    output[i] = token < brought[row] ? total[i] = decay_ * total[i] + value[i] : 0.0f;
    }

private:
    still::Op const& op_;
    float decay_;
    Remembered<Sizes> sizes_;
};

} // namespace

Entry toy_entry()
{
    return {"Decay", [](still::Op const& op, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(op, half); }};
}

} // namespace still_cpu
