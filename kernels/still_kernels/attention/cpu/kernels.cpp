// The tasks of softmax attention. Compiled once per instruction set; STILL_KERNELS names the table.
#include "attention.h"

#include <type_traits>

#include "cpu/common/columns.h"

namespace
{

using namespace still_cpu::softmax;

size_t room(Layer const& l)
{
    int64_t const tokens = block_tokens(l), wide = block_width(l, tokens);
    int64_t const dense = wide * ((l.dim + 15) / 16 * 16);
    return static_cast<size_t>(
        partial_size(l, tokens) + dense + l.dim * wide + kTileKeys * wide + kTileKeys * l.dim + 8 * 16);
}

// Iterates over the blocks of keys that any token of a block has chosen, and knows which tokens read the current one.
struct Readers
{
    int place[kBlockColumns]; // each token's current slot
    bool reads[kBlockColumns];

    void start(int slot, int count)
    {
        for (int i = 0; i < count; ++i)
            place[i] = slot, reads[i] = false;
    }

    // The lowest current block of the tokens, in slots before `last`; -1: none is left.
    template <typename Columns>
    int32_t next(Columns const& block, int last)
    {
        int32_t least = -1;
        for (int i = 0; i < block.b.count; ++i)
        {
            int32_t const* const chosen = block.chosen(i);
            int const end = last < block.l.slots ? last : block.l.slots;
            place[i] += reads[i];
            while (place[i] < end && chosen[place[i]] < 0)
                ++place[i];
            if (place[i] < end && (least < 0 || chosen[place[i]] < least))
                least = chosen[place[i]];
        }
        for (int i = 0; i < block.b.count; ++i)
            reads[i] = least >= 0 && place[i] < (last < block.l.slots ? last : block.l.slots) && block.chosen(i)[place[i]] == least;
        return least;
    }
};

// One block of queries, stored by column, so that maxima and sums use whole vectors.
template <typename T>
struct Columns
{
    Layer const& l;
    Tensors const& x;
    Block const& b;
    int columns, wide;

    explicit Columns(Task const& task)
        : l(*task.layer), x(*task.tensors), b(task.block), columns(b.count * l.group()),
          wide(round_up(columns, kLanes))
    {
    }

    // Queries and outputs of a token are contiguous for the heads of a group.
    int64_t token(int i) const { return ((b.row * x.tokens + b.token + i) * l.heads + b.head * l.group()) * l.dim; }
    int64_t cache(int64_t key) const { return (static_cast<int64_t>(b.row) * l.kv_heads + b.head) * l.rows + key; }

    // Sets -inf for keys that a token must not read yet: those after its position.
    void hide(float* logits, int64_t key, int count) const
    {
        for (int j = 0; j < count; ++j)
        {
            int64_t const ahead = (key + j - b.position) * l.group(); // columns of tokens before the key's
            int const hidden = static_cast<int>(ahead < columns ? ahead : columns);
            for (int c = 0; c < hidden; ++c)
                logits[static_cast<int64_t>(j) * wide + c] = kMinusInfinity;
        }
    }

    // Sets -inf for keys of a block in tokens that have not chosen it.
    void hide_from(Readers const& readers, float* logits, int count) const
    {
        int const group = l.group();
        for (int i = 0; i < b.count; ++i)
            for (int j = 0; !readers.reads[i] && j < count; ++j)
                for (int c = i * group; c < (i + 1) * group; ++c)
                    logits[static_cast<int64_t>(j) * wide + c] = kMinusInfinity;
    }

    // The chosen blocks of the block's token i.
    int32_t const* chosen(int i) const
    {
        return x.blocks + ((b.row * x.tokens + b.token + i) * l.kv_heads + b.head) * l.slots;
    }

    // output = values / total
    void finish(float const* total, float* values, float* dense) const
    {
        for (int c = 0; c < wide; c += kLanes)
        {
            Vec const share = 1 / load(total + c);
            for (int d = 0; d < l.dim; ++d)
            {
                float* const at = values + static_cast<int64_t>(d) * wide + c;
                store(at, load(at) * share);
            }
        }
        int const stride = round_up(l.dim, kLanes), group = l.group();
        transpose(values, l.dim, columns, wide, 1, dense, stride);
        for (int i = 0; i < b.count; ++i)
        {
            T* const out = at<T>(x.output, token(i));
            for (int g = 0; g < group; ++g)
                for (int d = 0; d < l.dim; ++d)
                    from_float(dense[static_cast<int64_t>(i * group + g) * stride + d], out + g * l.dim + d);
        }
    }
};

// S is the cache's type.
template <typename T, typename S>
void attend(Task const& task, int64_t from, int64_t to, float* partial)
{
    Columns<T> const block(task);
    Layer const& l = block.l;
    int64_t const wide = block.wide;
    Room room{task.room};
    float* const dense = room.take(wide * round_up(l.dim, 16));
    float* const logits = room.take(kTileKeys * wide);
    float* const copy = room.take(static_cast<int64_t>(kTileKeys) * l.dim);
    float const* const queries = turned_queries(at<T>(block.x.query, block.token(0)), static_cast<int64_t>(l.heads) * l.dim, block.b.count,
        l.group(), l.dim, wide, dense, room.take(l.dim * wide));
    float* const top = partial ? partial : room.take((2 + static_cast<int64_t>(l.dim)) * wide);
    float *const total = top + wide, *const values = total + wide;
    begin_columns(block.wide, l.dim, top, total, values);
    Readers readers;
    auto const attend_keys = [&](int64_t key, int64_t end)
    {
        int const count = static_cast<int>(end - key < kTileKeys ? end - key : kTileKeys);
        int64_t stride;
        float const* const k = kept_floats<S>(block.x.key_cache, block.cache(key), count, l.dim, copy, stride);
        gemm(count, block.wide, l.dim, k, stride, 1, queries, wide, logits, wide, false);
        if (key + count - 1 > block.b.position)
            block.hide(logits, key, count);
        if (l.slots && block.b.count > 1)
            block.hide_from(readers, logits, count);
        absorb(logits, count, block.wide, l.dim, top, total, values);
        float const* const v = kept_floats<S>(block.x.value_cache, block.cache(key), count, l.dim, copy, stride);
        gemm(l.dim, block.wide, count, v, 1, stride, logits, wide, values, wide, true);
    };
    if (!l.slots)
        for (int64_t key = from; key < to; key += kTileKeys)
            attend_keys(key, to);
    else
    {
        int const last = static_cast<int>(to / l.block_size);
        readers.start(static_cast<int>(from / l.block_size), block.b.count);
        int64_t const seen = block.b.position + block.b.count;
        for (int32_t chosen = readers.next(block, last); chosen >= 0; chosen = readers.next(block, last))
        {
            int64_t const first = static_cast<int64_t>(chosen) * l.block_size, end = first + l.block_size;
            for (int64_t key = first; key < (end < seen ? end : seen); key += kTileKeys)
                attend_keys(key, end < seen ? end : seen);
        }
    }
    if (!partial)
        block.finish(total, values, dense);
}

template <typename T>
void combine(Task const& task, int parts, float* partials)
{
    Columns<T> const block(task);
    int const wide = block.wide, dim = block.l.dim;
    int64_t const size = partial_size(block.l, block.b.count);
    for (int c = 0; c < wide; c += kLanes)
    {
        Vec most = load(partials + c);
        for (int p = 1; p < parts; ++p)
            most = larger(most, load(partials + p * size + c));
        Vec all = {};
        for (int p = 0; p < parts; ++p)
        {
            float* const one = partials + p * size + c;
            Vec const share = exponential(load(one) - most);
            all += share * load(one + wide);
            for (int64_t d = 2; d < 2 + dim; ++d)
            {
                Vec const term = share * load(one + d * wide);
                store(partials + c + d * wide, p ? load(partials + c + d * wide) + term : term);
            }
        }
        store(partials + wide + c, all);
    }
    block.finish(partials + wide, partials + 2 * wide, task.room);
}

template <typename T>
constexpr Kernels kTable{room, attend<T, T>, nullptr, combine<T>};

// With float activations.
template <typename S>
constexpr Kernels kKept{room, attend<float, S>, keep<S>, combine<float>};

} // namespace

still_cpu::softmax::Kernels const& still_cpu::softmax::STILL_KERNELS(Numbers kind)
{
    switch (kind)
    {
    case Numbers::kHalf: return kTable<Half>;
    case Numbers::kFloatKeptHalf: return kKept<Half>;
    case Numbers::kFloatKeptCodes: return kKept<Code>;
    default: return kTable<float>;
    }
}
