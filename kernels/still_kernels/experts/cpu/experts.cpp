#include "experts.h"

#include <algorithm>

#include "core/error.h"
#include "cpu/common/scratch.h"

namespace still_cpu::experts
{
namespace
{

constexpr size_t kLanes = 16;              // most useful threads
constexpr int64_t kMostPairs = 4096;       // pairs of token and expert processed at once
constexpr int64_t kMostBytes = 128 << 10;  // of a matrix, to stay in a processor's cache for all tokens
constexpr int64_t kSerialNumbers = 16 << 10; // of pairs, below which a task costs less than waking a thread

using low_bit::up;

int64_t row_bytes(Layer const& layer, low_bit::Layer const& matrix)
{
    return matrix.bits ? matrix.row_bytes() : matrix.inputs * (layer.half ? 2 : 4);
}

// Outputs of a task.
int64_t rows_of_task(Layer const& layer, low_bit::Layer const& matrix)
{
    int64_t const rows = std::max<int64_t>(kMostBytes / row_bytes(layer, matrix) / low_bit::kRows, 1) * low_bit::kRows;
    return std::min(rows, matrix.outputs);
}

// Layout of a call's scratch memory.
struct Parts
{
    int64_t *starts, *experts, *places, *tokens; // first pair of each expert; chosen experts; place of each pair; token of each place
    float *wide, *inner, *middle;
    Rooms sums, rooms;
    float* block_sums; // of pairs: sums of the rounded ones by block
    low_bit::Rounded rounded{}, rest{};

    void lay_out(Layer const& layer, int64_t count, int step, Scratch& scratch)
    {
        auto const pairs = static_cast<size_t>(count * layer.chosen);
        starts = scratch.take<int64_t>(static_cast<size_t>(layer.experts + 1));
        experts = scratch.take<int64_t>(static_cast<size_t>(layer.experts));
        places = scratch.take<int64_t>(pairs);
        tokens = scratch.take<int64_t>(pairs);
        wide = scratch.take<float>(pairs * static_cast<size_t>(layer.channels()));
        inner = scratch.take<float>(pairs * static_cast<size_t>(layer.gate_up.outputs));
        middle = scratch.take<float>(pairs * static_cast<size_t>(layer.inner()));
        sums = scratch.take_rooms(kLanes, static_cast<size_t>(layer.channels()));
        int64_t const longest = std::max(layer.channels(), layer.inner());
        if (layer.gate_up.bits && layer.gate_up.rounded())
        {
            auto const units = static_cast<size_t>(low_bit::units_of(longest, step)) * pairs;
            for (low_bit::Rounded* each : {&rounded, &rest})
            {
                each->codes = scratch.take<int8_t>(units * low_bit::kUnit);
                each->factors = scratch.take<float>(units * low_bit::kRows);
                each->sums = scratch.take<float>(units * low_bit::kRows);
            }
            block_sums = scratch.take<float>(static_cast<size_t>(longest / layer.gate_up.block) * pairs);
        }
        if (layer.gate_up.bits)
            rooms = scratch.take_rooms(kLanes, static_cast<size_t>(2 * up(longest, 16)));
    }
};

// A call, `count` tokens at once from `first`.
class Mixing
{
public:
    Mixing(Layer const& layer, Tensors const& tensors, Parts const& parts, Host& host)
        : layer_(layer), x_(tensors), parts_(parts), host_(host), kernels_(kernels_of(host.instruction_set, numbers(layer.half))),
          low_bit_(low_bit::kernels_for(host.instruction_set, false))
    {
    }

    void mix(int64_t first, int64_t count)
    {
        int64_t const pairs = count * layer_.chosen, channels = layer_.channels(), inner = layer_.inner();
        int64_t const element = layer_.half ? 2 : 4;
        sort(x_.expert + first * layer_.chosen, pairs);
        char const* const input = static_cast<char const*>(x_.input) + first * channels * element;
        char* const output = static_cast<char*>(x_.output) + first * channels * element;
        each(pairs, channels,
            [&](int64_t place, size_t)
            {
                float* const own = parts_.wide + place * channels;
                kernels_.widen(input + parts_.tokens[place] * channels * element, channels, own);
                round(layer_.gate_up, own, place);
            });
        multiply(layer_.gate_up, x_.gate_up, parts_.wide, parts_.inner);
        each(pairs, inner,
            [&](int64_t place, size_t)
            {
                float* const own = parts_.middle + place * inner;
                kernels_.activate(parts_.inner + place * layer_.gate_up.outputs, inner, layer_.gated, own);
                round(layer_.down, own, place);
            });
        multiply(layer_.down, x_.down, parts_.middle, parts_.wide);
        each(count, channels * layer_.chosen,
            [&](int64_t token, size_t lane)
            {
                kernels_.combine(parts_.wide, parts_.places + token * layer_.chosen, x_.weight + (first + token) * layer_.chosen,
                    layer_.chosen, channels, parts_.sums.of(lane), output + token * channels * element);
            });
    }

private:
    // Sorts the pairs by expert, stable.
    void sort(int32_t const* expert, int64_t pairs)
    {
        std::fill_n(parts_.starts, layer_.experts + 1, 0);
        for (int64_t i = 0; i < pairs; ++i)
            ++parts_.starts[expert[i] + 1];
        chosen_ = 0;
        for (int64_t e = 0; e < layer_.experts; ++e)
        {
            if (parts_.starts[e + 1])
                parts_.experts[chosen_++] = e;
            parts_.starts[e + 1] += parts_.starts[e];
        }
        for (int64_t i = 0; i < pairs; ++i)
        {
            int64_t const place = parts_.starts[expert[i]]++;
            parts_.places[i] = place;
            parts_.tokens[place] = i / layer_.chosen;
        }
        for (int64_t e = layer_.experts; e > 0; --e) // each was advanced to the next one's start
            parts_.starts[e] = parts_.starts[e - 1];
        parts_.starts[0] = 0;
    }

    // Runs fn(index, lane) for index < count, with `numbers` each.
    template <typename Function>
    void each(int64_t count, int64_t numbers, Function const& fn)
    {
        int64_t const group = std::max<int64_t>(kSerialNumbers / numbers, 1);
        spread(host_, kLanes, static_cast<size_t>(up(count, group) / group),
            [&](size_t task, size_t lane)
            {
                int64_t const begin = static_cast<int64_t>(task) * group;
                for (int64_t i = begin; i < std::min(begin + group, count); ++i)
                    fn(i, lane);
            });
    }

    // Those of the pairs from `place`.
    low_bit::Rounded from(low_bit::Rounded here, low_bit::Layer const& matrix, int64_t place) const
    {
        here.units = low_bit::units_of(matrix.inputs, low_bit_.step);
        here.codes += place * here.units * low_bit::kUnit;
        here.factors += place * here.units * low_bit::kRows, here.sums += place * here.units * low_bit::kRows;
        return here;
    }

    void round(low_bit::Layer const& matrix, float const* own, int64_t place) const
    {
        if (!parts_.rounded.codes)
            return;
        low_bit::Rounded const rest = from(parts_.rest, matrix, place);
        low_bit::Rounded here = from(parts_.rounded, matrix, place);
        here.rest = &rest;
        low_bit::Tensors tensors{};
        tensors.input = own;
        low_bit_.round({&matrix, &tensors, &here, 0, 1, 0, 0, nullptr});
        int64_t const blocks = matrix.blocks(), units = matrix.block / low_bit::kUnit;
        for (int64_t b = 0; b < blocks; ++b)
        {
            float total = 0;
            for (int64_t u = b * units; u < (b + 1) * units; ++u)
                total += here.sums[u * low_bit::kRows] + rest.sums[u * low_bit::kRows];
            parts_.block_sums[place * blocks + b] = total;
        }
    }

    // Every chosen expert's matrix times its pairs, [pairs, inputs] to [pairs, outputs].
    void multiply(low_bit::Layer const& matrix, Matrix const& weight, float const* input, float* output)
    {
        int64_t const rows = rows_of_task(layer_, matrix), tasks = up(matrix.outputs, rows) / rows;
        spread(host_, kLanes, static_cast<size_t>(chosen_ * tasks),
            [&](size_t index, size_t lane)
            {
                int64_t const expert = parts_.experts[static_cast<int64_t>(index) / tasks];
                int64_t const row = static_cast<int64_t>(index) % tasks * rows, place = parts_.starts[expert];
                Task const task{nullptr, matrix.inputs, matrix.outputs, row, std::min(rows, matrix.outputs - row),
                    input + place * matrix.inputs, output + place * matrix.outputs, parts_.starts[expert + 1] - place};
                multiply_rows(matrix, weight, expert, place, task, parts_.rooms.of(lane));
            });
    }

    // The rows of `task` of an expert whose pairs start at `place`.
    void multiply_rows(low_bit::Layer const& matrix, Matrix const& weight, int64_t expert, int64_t place, Task task, float* room) const
    {
        int64_t const first = expert * matrix.outputs;
        auto const* const values = static_cast<uint8_t const*>(weight.values) + first * row_bytes(layer_, matrix);
        if (matrix.bits == 0)
        {
            task.weight = values;
            return kernels_.multiply(task);
        }
        low_bit::Layer own = matrix;
        low_bit::Tensors x{};
        x.input = task.input, x.blocks = values, x.output = task.output;
        x.scales = static_cast<char const*>(weight.scales) + first * matrix.blocks() * (matrix.half_scales ? 2 : 4);
        x.zero_points = weight.zero_points ? weight.zero_points + first * matrix.zero_bytes : nullptr;
        low_bit::Rounded const rest = from(parts_.rest, matrix, matrix.rounded() ? place : 0);
        low_bit::Rounded here = from(parts_.rounded, matrix, matrix.rounded() ? place : 0);
        here.rest = &rest;
        if (!matrix.rounded() || !x.zero_points)
            return (matrix.rounded() ? low_bit_.multiply : low_bit_.exact)({&own, &x, &here, 0, task.tokens, task.row, task.rows, room});
        // Subtracts a row's zero points together: within the GEMM's steps they take two fifths of its time (1.22 instead of 0.74 ms, one
        // token, 12,288 x 1,536 on one processor with AVX2).
        int64_t const blocks = matrix.blocks();
        Zeros const zeros{&matrix, x.zero_points + task.row * matrix.zero_bytes, static_cast<float const*>(x.scales) + task.row * blocks,
            parts_.block_sums + place * blocks, room};
        own.zero = 0, x.zero_points = nullptr;
        low_bit_.multiply({&own, &x, &here, 0, task.tokens, task.row, task.rows, room});
        kernels_.subtract_zeros(task, zeros);
    }

    Layer const& layer_;
    Tensors const& x_;
    Parts const& parts_;
    Host& host_;
    Kernels const& kernels_;
    low_bit::Kernels const& low_bit_;
    int64_t chosen_ = 0; // experts
};

} // namespace

void mix(Layer const& layer, Tensors const& tensors, Host& host)
{
    for (int64_t i = 0; i < tensors.tokens * layer.chosen; ++i)
        if (int32_t const expert = tensors.expert[i]; expert < 0 || expert >= layer.experts)
            still::fail("Experts: expert ", expert, " is chosen; there are ", layer.experts, ", counted from 0.");
    int64_t const most = std::min(tensors.tokens, std::max<int64_t>(kMostPairs / layer.chosen, 1));
    int const step = low_bit::kernels_for(host.instruction_set, false).step;
    Parts parts;
    Scratch const scratch(host, [&](Scratch& from) { parts.lay_out(layer, most, step, from); });
    Mixing mixing(layer, tensors, parts, host);
    for (int64_t first = 0; first < tensors.tokens; first += most)
        mixing.mix(first, std::min(most, tensors.tokens - first));
}

} // namespace still_cpu::experts
