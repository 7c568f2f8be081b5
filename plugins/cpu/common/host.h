// What CPU kernels need of a host: parallel tasks, and memory. They are independent of the host.
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
    // Runs task(data, 0 .. total - 1), some of them in parallel.
    virtual void run(void (*task)(void* data, size_t index), size_t total, void* data) = 0;
    // Valid until the next request, at most until the call ends.
    virtual void* scratch(size_t size_bytes) = 0;
};

constexpr size_t kMaxLanes = 64; // most tasks with a room at once

// Runs fn(index, lane) for index < total, on at most `lanes` threads. A thread takes the next index when it finishes one.
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

// The same for tasks of equal length: a thread takes neighbours. The host assigns them to the same threads in every call, so that a task's
// data stays in its processor's cache.
template <typename Function>
void spread_evenly(Host& host, size_t lanes, size_t total, Function const& fn)
{
    constexpr size_t most = 16; // parts: for 32 heads, as many as processors can use in a call of about 50 microseconds
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
