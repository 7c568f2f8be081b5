// What a fuzz target reads its choices from: bytes, used up one after another; behind the end every choice is the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "cpu/common/host.h"

namespace still_fuzz
{

class Input
{
public:
    Input(uint8_t const* data, size_t size) : mData(data), mSize(size) {}

    template <typename T>
    T raw()
    {
        T value{};
        size_t const count = mSize < sizeof value ? mSize : sizeof value;
        std::memcpy(&value, mData, count);
        mData += count, mSize -= count;
        return value;
    }

    // A number in least..most.
    int64_t between(int64_t least, int64_t most)
    {
        return least + static_cast<int64_t>(raw<uint32_t>() % static_cast<uint64_t>(most - least + 1));
    }

    bool one_in(int64_t count) { return between(1, count) == count; }

    // What a hostile file puts where a number is expected.
    int64_t extreme()
    {
        static constexpr int64_t kKnown[] = {0, -1, 1, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min(),
            std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), int64_t{1} << 32, (int64_t{1} << 32) + 1,
            int64_t{1} << 62, (int64_t{1} << 40) + 1, int64_t{1} << 24, 65536, 65537, -64, 1 << 16};
        int64_t const which = between(0, 16);
        return which == 16 ? raw<int64_t>() : kKnown[which];
    }

    bool empty() const { return mSize == 0; }
    uint8_t const* rest() const { return mData; }
    size_t left() const { return mSize; }

private:
    uint8_t const* mData;
    size_t mSize;
};

using Bytes = std::unique_ptr<char[]>;

// Memory of exactly the bytes that a tensor has, so that the sanitizer sees a step over its end: floats of low .. high, halves of 0.5 .. 1
// and their negatives, or any bytes as codes. `wild`: some are what else numbers can be.
inline Bytes tensor(int64_t count, int element, uint32_t seed, bool wild, float low = -2, float high = 2)
{
    static constexpr float kSpecial[] = {0, -0.0f, 1e30f, -1e30f, 1e-40f, __builtin_inff(), -__builtin_inff(), __builtin_nanf("")};
    Bytes bytes(new char[static_cast<size_t>(count) * static_cast<size_t>(element)]);
    std::minstd_rand random(seed + 1);
    for (int64_t i = 0; i < count; ++i)
    {
        float value = low + (high - low) * static_cast<float>(random() % 4001) / 4000;
        auto half = static_cast<uint16_t>((random() % 2 ? 0x3800u : 0xb800u) | random() % 1024);
        if (wild && random() % 16 == 0)
            value = kSpecial[random() % 8], half = static_cast<uint16_t>(random());
        if (element == 4)
            std::memcpy(bytes.get() + 4 * i, &value, 4);
        else if (element == 2)
            std::memcpy(bytes.get() + 2 * i, &half, 2);
        else
            bytes[static_cast<size_t>(i)] = static_cast<char>(random());
    }
    return bytes;
}

inline float* floats(Bytes const& bytes, int64_t place = 0)
{
    return reinterpret_cast<float*>(bytes.get()) + place;
}

// Tasks run one after another, backwards, as none may rest on the one before it; memory has exactly its bytes, so that the sanitizer sees
// a step over its end.
struct Backwards : still_cpu::Host
{
    std::unique_ptr<char[]> memory;

    explicit Backwards(int set) { instruction_set = set; }

    void run(void (*task)(void*, size_t), size_t total, void* data) override
    {
        for (size_t i = total; i > 0; --i)
            task(data, i - 1);
    }
    void* scratch(size_t size_bytes) override
    {
        memory.reset(new char[size_bytes]);
        return memory.get();
    }
};

} // namespace still_fuzz
