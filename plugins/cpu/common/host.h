// What kernels of the CPU need of a host: a way to run tasks at once, and memory. They know no host.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace still_cpu
{

struct Host
{
    int instruction_set = 0;

    virtual ~Host() = default;
    // Runs task(data, 0 .. total - 1), some of them at once.
    virtual void run(void (*task)(void* data, size_t index), size_t total, void* data) = 0;
    // Valid until the next request, and as long as the call.
    virtual void* scratch(size_t size_bytes) = 0;
};

constexpr size_t kMaxLanes = 64; // tasks that have room at once

// Runs fn(index, lane) for index < total, on at most `lanes` threads that take the next index when they are done with one.
template <typename Function>
void spread(Host& host, size_t lanes, size_t total, Function const& fn)
{
    struct Work
    {
        Function const& fn;
        size_t total;
        std::atomic<size_t> next;
    } work{fn, total, {0}};
    auto const lane = [](void* data, size_t index)
    {
        Work& w = *static_cast<Work*>(data);
        for (size_t i = w.next++; i < w.total; i = w.next++)
            w.fn(i, index);
    };
    size_t const used = std::min(total, lanes);
    if (used == 1)
        lane(&work, 0);
    else if (used)
        host.run(lane, used, &work);
}

// The same for tasks that take equally long: a thread takes neighbours, which the host gives to the same threads in every call, so that
// what a task keeps stays in its processor's cache.
template <typename Function>
void spread_evenly(Host& host, size_t lanes, size_t total, Function const& fn)
{
    constexpr size_t most = 16; // parts: of 32 heads, as many as processors have use for in a call of some 50 microseconds
    struct Work
    {
        Function const& fn;
        size_t total, parts;
    } work{fn, total, std::min({total, lanes, most})};
    auto const part = [](void* data, size_t index)
    {
        Work const& w = *static_cast<Work const*>(data);
        for (size_t i = index * w.total / w.parts; i < (index + 1) * w.total / w.parts; ++i)
            w.fn(i, index);
    };
    if (work.parts == 1)
        part(&work, 0);
    else if (work.parts)
        host.run(part, work.parts, &work);
}

} // namespace still_cpu
