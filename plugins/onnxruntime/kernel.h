// What the adapter asks of an op's kernel, and what it gives: tensors of a call, scratch memory, threads. No host.
#pragma once

#include <memory>
#include <mutex>

#include "../cpu/common/host.h"
#include "schema.h"

namespace still_ort
{

// A call of a node. Inputs go by their place in the OpSpec.
struct Call
{
    still_cpu::Host host{};
    int instruction_set = 0;
    Shapes shapes;

    virtual ~Call() = default;
    virtual void* input(size_t place) = 0; // null where it is absent
    virtual void* output(size_t place, std::vector<int64_t> const& shape) = 0;
    // The present buffer of the state whose past is this input, holding the past: kernels work in place. Null where it is absent.
    virtual void* state(size_t past) = 0;
    // Valid until the next request, and as long as the call.
    virtual void* scratch(size_t size_bytes) = 0;

    int64_t const* counts(size_t place) { return static_cast<int64_t const*>(input(place)); }
};

struct Kernel
{
    virtual ~Kernel() = default;
    virtual void compute(Call& call) = 0;
};

// An op of the library: its name, and what makes the kernel of a node. Throws Refused for attributes that no kernel knows.
struct Entry
{
    char const* op;
    std::unique_ptr<Kernel> (*make)(Attributes const& attributes, bool half);
};

std::unique_ptr<Kernel> make_attention(Attributes const& attributes, bool half);
std::unique_ptr<Kernel> make_hybrid_attention(Attributes const& attributes, bool half);

inline constexpr Entry kEntries[] = {
    {"Attention", make_attention},
    {"HybridAttention", make_hybrid_attention},
};

// What follows from the shapes of the latest call, as steps are alike; a session may be run from several threads.
template <typename Sizes>
class Remembered
{
public:
    template <typename Function>
    Sizes of(Shapes const& shapes, Function const& compute)
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (!sizes_ || shapes != known_)
        {
            sizes_ = compute(shapes);
            known_ = shapes;
        }
        return *sizes_;
    }

private:
    std::mutex mutex_;
    Shapes known_;
    std::optional<Sizes> sizes_;
};

} // namespace still_ort
