// What a fuzz target reads its choices from: bytes, used up one after another; behind the end every choice is the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

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

} // namespace still_fuzz
