// Runs a call of still::MatMulNBits or still::ExpertsNBits by the kernels of an instruction set.
//
//   products                   names the instruction sets that this processor has, best first
//   products CALL OUTPUT I N   runs the call of the file CALL N times by the I-th of them; the output goes to the file OUTPUT
//
// CALL has tensors, each after its number of bytes as int64: first numbers as int64, then the op's inputs, of none bytes where absent.
#include "experts/cpu/experts.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

namespace
{

using namespace still_cpu;

struct Call
{
    std::vector<std::vector<char>> tensors;
    int64_t const* numbers;

    explicit Call(char const* path)
    {
        std::ifstream file(path, std::ios::binary);
        for (int64_t size; file.read(reinterpret_cast<char*>(&size), sizeof size);)
        {
            tensors.emplace_back(static_cast<size_t>(size));
            file.read(tensors.back().data(), size);
        }
        numbers = static_cast<int64_t const*>(of(0));
    }

    void const* of(size_t index) const { return tensors[index].empty() ? nullptr : tensors[index].data(); }
    uint8_t const* bytes(size_t index) const { return static_cast<uint8_t const*>(of(index)); }
};

low_bit::Layer layer_of(int64_t const* x)
{
    return {x[0], x[1], static_cast<int>(x[2]), static_cast<int>(x[3]), static_cast<int>(x[4]), x[5], false, x[6] != 0,
        static_cast<int>(x[7])};
}

struct InOrder : Host
{
    std::vector<char> memory;

    explicit InOrder(int set) { instruction_set = set; }

    void run(void (*task)(void*, size_t), size_t total, void* data) override
    {
        for (size_t i = 0; i < total; ++i)
            task(data, i);
    }
    void* scratch(size_t size_bytes) override
    {
        memory.resize(size_bytes);
        return memory.data();
    }
};

// One layer's eight numbers, then those of the tokens.
void multiply(Call const& call, float* output, InOrder& host)
{
    low_bit::Layer const layer = layer_of(call.numbers);
    low_bit::Tensors const x{call.of(1), call.bytes(2), call.of(3), call.bytes(4), call.of(5), output, call.numbers[8]};
    low_bit::multiply(layer, x, host);
}

// Two layers', then E, K and whether it is gated, then those of the tokens.
void mix(Call const& call, float* output, InOrder& host)
{
    int64_t const* const x = call.numbers;
    experts::Layer const layer{layer_of(x), layer_of(x + 8), x[16], x[17], x[18] != 0, false};
    experts::Tensors const tensors{call.of(1), static_cast<int32_t const*>(call.of(2)), static_cast<float const*>(call.of(3)),
        {call.of(4), call.of(5), call.bytes(6)}, {call.of(7), call.of(8), call.bytes(9)}, output, x[19]};
    experts::mix(layer, tensors, host);
}

} // namespace

int main(int argc, char** argv)
{
    if (argc != 5)
    {
        for (int set = 0; set < count_instruction_sets(); ++set)
            std::puts(instruction_set_name(set));
        return 0;
    }
    Call const call(argv[1]);
    bool const experts = call.tensors.size() > 6;
    int64_t const tokens = call.numbers[experts ? 19 : 8], outputs = call.numbers[experts ? 8 : 0];
    std::vector<float> output(static_cast<size_t>(tokens * outputs));
    InOrder host(std::atoi(argv[3]));
    for (int run = 0; run < std::atoi(argv[4]); ++run)
        (experts ? mix : multiply)(call, output.data(), host);
    std::ofstream(argv[2], std::ios::binary)
        .write(reinterpret_cast<char const*>(output.data()), static_cast<std::streamsize>(output.size() * sizeof(float)));
    return 0;
}
