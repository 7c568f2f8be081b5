// Attributes, shapes and counts of a call, as hosts take them from a graph and its inputs: what the core's binding and the CPU kernel of
// any op let pass is computed, in memory of exactly its size.
#include "core/error.h"
#include "cpu/common/instruction_sets.h"
#include "cpu/common/kernel.h"
#include "input.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace
{

using still_fuzz::Input;

constexpr size_t kMostBytes = 1 << 16; // of a tensor; a larger one is no finding

struct TooLarge
{
};

// Inputs and outputs of zeros, but for the counts.
class Memory : public still_cpu::HostCall
{
public:
    Memory(Input& input, still::Op const& op, std::vector<still::Tensor> const& given, bool wild)
        : HostCall(op.spec()), mTensors(spec.inputs.size())
    {
        tensors = given;
        instruction_set = static_cast<int>(input.between(0, still_cpu::count_instruction_sets() - 1));
        size_t next = 0;
        for (size_t place = 0; place < mTensors.size(); ++place)
        {
            if (op.absent_inputs() >> place & 1)
                continue;
            mTensors[place] = &tensors[next++];
            if (spec.inputs[place].type != still::ElementType::kInteger)
                continue;
            auto* const counts = static_cast<int64_t*>(take(mTensors[place]->bytes()));
            for (size_t row = 0; row < mTensors[place]->bytes() / sizeof(int64_t); ++row)
                counts[row] = wild && input.one_in(4) ? input.extreme() : input.between(0, spec.inputs[place].name == "new_tokens" ? 3 : 64);
            mCounts[place] = counts;
        }
    }

    void run(void (*task)(void*, size_t), size_t total, void* data) override
    {
        for (size_t i = 0; i < total; ++i)
            task(data, i);
    }
    void* output(size_t, still::Tensor const& tensor) override { return take(tensor.bytes()); }
    void* scratch(size_t size_bytes) override { return take(size_bytes, 64 * kMostBytes); }

private:
    void* input_at(size_t place) override
    {
        if (mCounts.count(place))
            return mCounts[place];
        return mTensors[place] ? take(mTensors[place]->bytes()) : nullptr;
    }
    void* state_at(size_t past) override { return input_at(past); }

    void* take(size_t size, size_t most = kMostBytes)
    {
        if (size > most)
            throw TooLarge();
        mBlocks.emplace_back(new char[size]());
        return mBlocks.back().get();
    }

    std::vector<still::Tensor const*> mTensors; // by place; null where absent
    std::map<size_t, int64_t*> mCounts;
    std::vector<std::unique_ptr<char[]>> mBlocks;
};

std::map<std::string, still::AttributeValue> guess_attributes(Input& input, still::OpSpec const& spec, bool wild)
{
    std::map<std::string, still::AttributeValue> values;
    for (still::AttributeSpec const& attribute : spec.attributes)
    {
        if (!input.one_in(3))
            continue;
        still::AttributeValue value{attribute.kind, 0, static_cast<double>(input.raw<float>()), "unknown"};
        value.integer = wild && input.one_in(4) ? input.extreme() : input.between(0, 8);
        if (!attribute.choices.empty() && !(wild && input.one_in(8)))
            value.text = attribute.choices[static_cast<size_t>(input.between(0, static_cast<int64_t>(attribute.choices.size()) - 1))];
        values[attribute.name] = value;
    }
    return values;
}

// Shapes that mostly fit each other, with some dimensions and ranks that do not.
std::vector<still::Tensor> guess_tensors(Input& input, still::Op const& op, bool half, bool wild)
{
    std::map<std::string, int64_t> sizes{{"B", input.between(0, 3)}, {"T", input.between(wild ? 0 : 3, 5)}, {"HK", input.between(1, 3)},
        {"D", input.between(1, 8)}, {"P", input.between(1, 8)}, {"N", input.between(0, 40)}};
    sizes["H"] = sizes["HK"] * input.between(1, 3);
    auto const attribute = [&](char const* name) {
        auto const found = op.attributes().find(name);
        return found == op.attributes().end() ? 0 : found->second.integer;
    };
    auto const size_of = [&](std::string const& symbol) -> int64_t {
        if (auto const known = sizes.find(symbol); known != sizes.end())
            return known->second;
        if (symbol == "2*C")
            return std::clamp<int64_t>(attribute("chunk_size"), 0, 1 << 24) * 2;
        // Further symbols of an op follow from its attributes; these are guessed.
        bool const usual = !input.one_in(4);
        return symbol == "F" ? sizes["P"] * (usual ? 2 : 1) : sizes[usual ? "H" : "HK"];
    };
    still::Type const count = wild && input.one_in(8) ? still::Type::kInt32 : still::Type::kInt64; // hosts may have either
    std::map<std::string, int64_t> chosen; // a symbol has one size, whatever was thrown for it
    std::vector<still::Tensor> tensors;
    for (still::TensorSpec const* spec : op.inputs())
    {
        std::vector<int64_t> dims;
        for (std::string const& symbol : spec->shape)
            dims.push_back(wild && input.one_in(64) ? input.extreme() : chosen.emplace(symbol, size_of(symbol)).first->second);
        if (spec->weight && input.one_in(8))
            dims[0] = 1; // shared by all heads
        if (wild && input.one_in(32))
            dims.resize(static_cast<size_t>(input.between(0, 10)), input.extreme());
        still::Type type = spec->type == still::ElementType::kInteger ? count
            : spec->type == still::ElementType::kFloat32 || !half     ? still::Type::kFloat32
                                                                      : still::Type::kFloat16;
        if (wild && input.one_in(64))
            type = static_cast<still::Type>(input.between(0, 5));
        tensors.push_back(still::make_tensor(type, dims.data(), static_cast<int64_t>(dims.size()), spec->name));
    }
    return tensors;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    Input input(data, size);
    try
    {
        auto const& entries = still_cpu::entries();
        auto const& entry = entries[static_cast<size_t>(input.between(0, static_cast<int64_t>(entries.size()) - 1))];
        still::OpSpec const& spec = still::op_spec(entry.op);
        bool const half = input.one_in(2);
        bool const wild = input.one_in(2); // else most calls are computed
        uint64_t absent = 0;
        for (size_t i = 0; i < spec.inputs.size(); ++i)
            if (spec.inputs[i].optional ? input.one_in(2) : wild && input.one_in(64))
                absent |= uint64_t{1} << i;
        still::Op const op(spec, guess_attributes(input, spec, wild), absent);
        auto const kernel = entry.make(op, half);
        std::vector<still::Tensor> const tensors = guess_tensors(input, op, half, wild);
        op.infer(tensors);
        Memory memory(input, op, tensors, wild);
        kernel->compute(memory);
    }
    catch (still::Error const&)
    {
    }
    catch (TooLarge const&)
    {
    }
    return 0;
}
