// still::Attention: from a call's shapes to the layer that the kernels know.
#include "../cpu/attention/attention.h"

#include "kernel.h"

namespace still_ort
{
namespace
{

using still_cpu::softmax::Layer;

// Places of the inputs.
enum Input
{
    kQuery,
    kKey,
    kValue,
    kNewTokens,
    kPastLength,
    kPastKey,
    kPastValue
};

still::OpSpec const& op_spec()
{
    static still::OpSpec const& spec =
        spec_with("Attention", {"query", "key", "value", "new_tokens", "past_length", "past_key", "past_value"});
    return spec;
}

struct Sizes
{
    Layer layer;
    int batch;
    int64_t tokens;
};

Sizes read_shapes(Shapes const& shapes, bool half)
{
    Symbols known = read_symbols(op_spec(), shapes, {});
    check_dimensions(op_spec(), known, {"H", "HK", "D"});
    return {{static_cast<int>(known["H"]), static_cast<int>(known["HK"]), static_cast<int>(known["D"]), known["N"], half},
        static_cast<int>(known["B"]), known["T"]};
}

class Node : public Kernel
{
public:
    explicit Node(bool half) : half_(half) {}

    void compute(Call& call) override
    {
        Sizes const sizes = sizes_.of(call.shapes, [&](Shapes const& shapes) { return read_shapes(shapes, half_); });
        int64_t const *const past = call.counts(kPastLength), *const brought = call.counts(kNewTokens);
        for (int row = 0; row < sizes.batch; ++row)
        {
            check_range(op_spec(), row, past[row], brought[row], sizes.tokens);
            if (past[row] + brought[row] > sizes.layer.rows)
                throw Refused("still::Attention: row " + std::to_string(row) + " grows to " + std::to_string(past[row] + brought[row])
                              + " tokens; the state has room for " + std::to_string(sizes.layer.rows) + ". Give a larger state.");
        }
        still_cpu::softmax::Tensors x{};
        x.query = call.input(kQuery), x.key = call.input(kKey), x.value = call.input(kValue);
        x.output = call.output(0, *call.shapes[kQuery]);
        x.key_cache = call.state(kPastKey), x.value_cache = call.state(kPastValue);
        x.tokens = sizes.tokens;
        if (sizes.batch == 0)
            return;
        void* const scratch = call.scratch(still_cpu::softmax::scratch_size(sizes.layer, sizes.batch, past, brought));
        still_cpu::softmax::attention(sizes.layer, x, sizes.batch, past, brought, scratch, call.host, call.instruction_set);
    }

private:
    bool half_;
    Remembered<Sizes> sizes_;
};

} // namespace

std::unique_ptr<Kernel> make_attention(Attributes const&, bool half)
{
    return std::make_unique<Node>(half);
}

} // namespace still_ort
