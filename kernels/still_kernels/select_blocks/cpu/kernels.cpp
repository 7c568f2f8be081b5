// Sums of keys, and scores of blocks. Compiled once per instruction set; STILL_KERNELS names the table.
#include "select_blocks.h"

#include "cpu/common/columns.h"

namespace
{

using namespace still_cpu::select;

constexpr float kMost = 1e37f; // largest score

int64_t width(Layer const& l)
{
    return (task_tokens(l) * l.group() + 15) / 16 * 16;
}

size_t room(Layer const& l, int64_t tokens)
{
    int64_t const wide = width(l), rows = tokens / l.stride + 1, blocks = tokens / l.block + 1;
    int64_t const dense = wide * ((l.dim + 15) / 16 * 16);
    int64_t const coarse = (tokens / l.lse_stride + 1) * 16;
    return static_cast<size_t>(dense + l.dim * wide + rows * wide + coarse + task_tokens(l) * blocks + 8 * 16);
}

float* sums_of(Task const& task)
{
    Layer const& l = *task.layer;
    return task.tensors->sums + (static_cast<int64_t>(task.row) * l.kv_heads + task.head) * l.rows * l.dim;
}

template <typename T>
void add(Task const& task)
{
    Layer const& l = *task.layer;
    float* const sums = sums_of(task);
    for (int64_t i = 0; i < task.count; ++i)
    {
        int64_t const position = task.position + i;
        int64_t const token = task.row * task.tensors->tokens + task.token + i;
        T const* const key = at<T>(task.tensors->key, (token * l.kv_heads + task.head) * l.dim);
        float* const sum = sums + position / l.stride * l.dim;
        bool const first = position % l.stride == 0; // unfilled rows are not read
        for (int d = 0; d < l.dim; ++d)
            sum[d] = (first ? 0.0f : sum[d]) + to_float(key[d]);
    }
}

// Number of complete means for a token.
int64_t complete(int64_t position, int step, int length)
{
    return position + 1 < length ? 0 : (position + 1 - length) / step + 1;
}

// Sum of rows index .. index + count - 1 of [rows, wide], for one vector of columns.
Vec window(float const* rows, int64_t index, int count, int64_t wide)
{
    Vec total = load(rows + index * wide);
    for (int r = 1; r < count; ++r)
        total += load(rows + (index + r) * wide);
    return total;
}

float sum_of(float const* x, int n)
{
    Vec total = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        total += load(x + i);
    if (i < n)
        total += load_part(x + i, n - i, 0);
    return sum(total);
}

// Converts one vector of columns' products with all sums, in rows `wide` apart, to weights of the fine means. The limits are the numbers of
// coarse and fine means of each column.
void weigh(Layer const& l, float* products, int64_t wide, Vec coarse_limit, Vec fine_limit, int64_t coarse, int64_t fine, float* room)
{
    int const step = l.lse_stride / l.stride, many = l.lse_length / l.stride, few = l.length / l.stride;
    Vec most = spread(kMinusInfinity);
    for (int64_t i = 0; i < coarse; ++i)
    {
        Vec const logit = window(products, i * step, many, wide) * (1 / static_cast<float>(l.lse_length));
        Vec const known = spread(static_cast<float>(i)) < coarse_limit ? logit : spread(kMinusInfinity);
        most = larger(known, most);
        store(room + i * kLanes, known);
    }
    Vec total = {};
    most = larger(most, spread(-3e38f));
    for (int64_t i = 0; i < coarse; ++i)
        total += exponential(load(room + i * kLanes) - most);
    float logs[kLanes];
    store(logs, total);
    for (int c = 0; c < kLanes; ++c)
        logs[c] = __builtin_logf(logs[c]);
    Vec const normalizer = most + load(logs);
    Vec const ceiling = spread(80);
    for (int64_t j = 0; j < fine; ++j)
    {
        Vec share = window(products, j, few, wide) * (1 / static_cast<float>(l.length)) - normalizer;
        share = exponential(share > ceiling ? ceiling : share);
        store(products + j * wide, spread(static_cast<float>(j)) < fine_limit ? share : Vec{});
    }
}

template <typename T>
float const* score(Task const& task, int64_t& pitch)
{
    Layer const& l = *task.layer;
    int const group = l.group(), columns = task.count * group;
    int64_t const wide = round_up(columns, kLanes), last = task.position + task.count - 1;
    int64_t const rows = (last + 1) / l.stride; // complete ones
    Room room{task.room};
    float* const dense = room.take(wide * round_up(l.dim, 16));
    float* const turned = room.take(l.dim * wide);
    float* const products = room.take(rows * wide);
    float* const coarse = room.take((last / l.lse_stride + 1) * 16);
    int64_t const token = (task.row * task.tensors->tokens + task.token) * l.heads + task.head * group;
    turned_queries(at<T>(task.tensors->query, token * l.dim), static_cast<int64_t>(l.heads) * l.dim, task.count, group, l.dim, wide, dense,
        turned);
    gemm(static_cast<int>(rows), static_cast<int>(wide), l.dim, sums_of(task), l.dim, 1, turned, wide, products, wide, false);
    int64_t const fine = complete(last, l.stride, l.length);
    for (int c = 0; c < wide; c += kLanes)
    {
        float coarse_limit[kLanes], fine_limit[kLanes];
        for (int i = 0; i < kLanes; ++i)
        {
            int64_t const token = c + i < columns ? (c + i) / group : task.count - 1;
            coarse_limit[i] = static_cast<float>(complete(task.position + token, l.lse_stride, l.lse_length));
            fine_limit[i] = static_cast<float>(complete(task.position + token, l.stride, l.length));
        }
        weigh(l, products + c, wide, load(coarse_limit), load(fine_limit), complete(last, l.lse_stride, l.lse_length), fine, coarse);
    }
    // A block's score is the largest of the means that share a key with it.
    int64_t const per = l.block / l.stride, shared = l.length / l.stride;
    pitch = last / l.block + 1;
    float* const scores = room.take(task.count * pitch);
    std::memset(scores, 0, sizeof(float) * static_cast<uint64_t>(task.count) * static_cast<uint64_t>(pitch));
    for (int64_t j = 0; j < fine; ++j)
        for (int i = 0; i < task.count; ++i)
        {
            float const whole = sum_of(products + j * wide + i * group, group), weight = whole < kMost ? whole : kMost;
            for (int64_t b = j / per; b <= (j + shared - 1) / per && b < pitch; ++b)
                if (weight > scores[i * pitch + b])
                    scores[i * pitch + b] = weight;
        }
    return scores;
}

template <typename T>
constexpr Kernels kTable{room, add<T>, score<T>};

} // namespace

still_cpu::select::Kernels const& still_cpu::select::STILL_KERNELS(Numbers kind)
{
    return kind == Numbers::kHalf ? kTable<Half> : kTable<float>;
}
