// Layout of a call's scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "host.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace still_cpu
{

// The address sanitizer treats the scratch memory as one block and would miss a step from one array into the next. In its builds arrays are
// this many bytes apart, and the gaps are poisoned.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 64;
inline void mark(uintptr_t begin, size_t size) { ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(begin), size); }
inline void clear(void* begin, size_t size) { ASAN_UNPOISON_MEMORY_REGION(begin, size); }
#else
constexpr size_t kGuard = 0;
inline void mark(uintptr_t, size_t) {}
inline void clear(void*, size_t) {}
#endif

// The memory of each of the parallel tasks.
struct Rooms
{
    float* first = nullptr;
    size_t distance = 0;

    float* of(size_t lane) const { return first + lane * distance; }
};

// The scratch memory of a call: consecutive arrays, 64-byte aligned.
class Scratch
{
public:
    // `lay_out` allocates the arrays; it runs twice, first to count their sizes.
    template <typename LayOut>
    Scratch(Host& host, LayOut const& lay_out)
    {
        lay_out(*this);
        size_ = next_ + 64;
        base_ = next_ = reinterpret_cast<uintptr_t>(host.scratch(size_));
        lay_out(*this);
    }
    Scratch(Scratch const&) = delete;
    Scratch& operator=(Scratch const&) = delete;
    ~Scratch() { clear(reinterpret_cast<void*>(base_), size_); }

    template <typename T>
    T* take(size_t count)
    {
        next_ = (next_ + 63) / 64 * 64;
        T* const taken = reinterpret_cast<T*>(next_);
        next_ += count * sizeof(T);
        if (base_)
            mark(next_, kGuard);
        next_ += kGuard;
        return taken;
    }

    // `lanes` arrays of `room` floats each.
    Rooms take_rooms(size_t lanes, size_t room)
    {
        size_t const distance = (room + 15) / 16 * 16 + kGuard / sizeof(float);
        Rooms const rooms{take<float>(lanes * distance), distance};
        for (size_t lane = 0; base_ && lane < lanes; ++lane)
            mark(reinterpret_cast<uintptr_t>(rooms.of(lane) + room), (distance - room) * sizeof(float));
        return rooms;
    }

private:
    uintptr_t base_ = 0;
    uintptr_t next_ = 0;
    size_t size_ = 0;
};

// Zeros an output of `tokens` tokens after each row's new ones; `bytes`: of a token.
inline void clear_ends(void* output, int batch, int64_t tokens, int64_t const* brought, size_t bytes)
{
    for (int row = 0; row < batch; ++row)
        std::memset(static_cast<char*>(output) + static_cast<size_t>(row * tokens + brought[row]) * bytes, 0,
            static_cast<size_t>(tokens - brought[row]) * bytes);
}

} // namespace still_cpu
