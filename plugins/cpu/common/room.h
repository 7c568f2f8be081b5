// The memory of a task, and typed places in tensors. Compiled once per instruction set, like simd.h.
#pragma once

#include <cstdint>

namespace
{

// Hands out the task's room, 64 bytes apart.
struct Room
{
    float* next;

    float* take(int64_t n)
    {
        float* const taken = next;
        next += (n + 15) / 16 * 16;
        return taken;
    }
};

template <typename T>
T* at(void* base, int64_t index)
{
    return static_cast<T*>(base) + index;
}

template <typename T>
T const* at(void const* base, int64_t index)
{
    return static_cast<T const*>(base) + index;
}

} // namespace
