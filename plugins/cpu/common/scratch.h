// Where the scratch memory of a call goes.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace still_cpu
{

// What lies side by side in the scratch memory is one block to the address sanitizer, which would not see a step from one array into
// the next: in its builds they lie this many bytes apart, and what is between is marked.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 64;
inline void mark(uintptr_t begin, size_t size) { ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(begin), size); }
inline void clear(void* begin, size_t size) { ASAN_UNPOISON_MEMORY_REGION(begin, size); }
#else
constexpr size_t kGuard = 0;
inline void mark(uintptr_t, size_t) {}
inline void clear(void*, size_t) {}
#endif

// Hands out arrays one behind the other, 64 bytes apart; with a null base only the size counts.
struct Scratch
{
    uintptr_t base;
    uintptr_t next;

    explicit Scratch(void* memory) : base(reinterpret_cast<uintptr_t>(memory)), next(base) {}

    template <typename T>
    T* take(size_t count)
    {
        next = (next + 63) / 64 * 64;
        T* const taken = reinterpret_cast<T*>(next);
        next += count * sizeof(T);
        if (base)
            mark(next, kGuard);
        next += kGuard;
        return taken;
    }

    // `lanes` arrays of `room` floats each, and the distance from one to the next.
    float* take_rooms(size_t lanes, size_t room, size_t& distance)
    {
        distance = (room + 15) / 16 * 16 + kGuard / sizeof(float);
        float* const rooms = take<float>(lanes * distance);
        for (size_t lane = 0; base && lane < lanes; ++lane)
            mark(reinterpret_cast<uintptr_t>(rooms + lane * distance + room), (distance - room) * sizeof(float));
        return rooms;
    }

    size_t used() const { return static_cast<size_t>(next - base); }
};

} // namespace still_cpu
