// What a host asks of an op's kernel on the CPU, and what the kernel asks of a call: tensors, scratch memory, threads.
#pragma once

#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../../core/op.h"
#include "host.h"
#include "kept.h"

namespace still_cpu
{

// A call as the host gives it. Tensors go by their place among the OpSpec's inputs or outputs, those that are absent counted.
struct HostCall
{
    Host host{};
    int instruction_set = 0;
    std::vector<still::Tensor> tensors; // types and shapes of the inputs that exist, in order

    virtual ~HostCall() = default;
    virtual void* input(size_t place) = 0; // null where it is absent
    virtual void* output(size_t place, still::Tensor const& tensor) = 0;
    // The present buffer of the state whose past is this input, holding the past: kernels work in place. Null where it is absent.
    virtual void* state(size_t past) = 0;
    // Of rows that may be kept in 8 bits, with the scales that they have then.
    Kept kept(size_t rows, size_t scales) { return {state(rows), static_cast<float*>(state(scales))}; }
    // Valid until the next request, and as long as the call.
    virtual void* scratch(size_t size_bytes) = 0;

    int64_t const* counts(size_t place) { return static_cast<int64_t const*>(input(place)); }
};

struct Kernel
{
    virtual ~Kernel() = default;
    // Throws still::Error for a call that the kernel does not compute.
    virtual void compute(HostCall& call) = 0;
};

// An op that has a kernel: its name, and what makes the kernel of a node. `op` outlives the kernel; `half`: activations are float16.
// Throws still::Error for attributes that no kernel knows. The op's folder defines `Entry FOLDER_entry()`.
struct Entry
{
    char const* op;
    std::unique_ptr<Kernel> (*make)(still::Op const& op, bool half);
};

// Every op of this library that has a kernel; CMake writes the list (../CMakeLists.txt).
std::vector<Entry> const& entries();

// Binds the tensors; throws still::Error where they do not fit, or where counts are not int64, which kernels here read.
still::Call bind(still::Op const& op, std::vector<still::Tensor> const& tensors);

// What follows from the shapes of the latest call, as steps are alike; a session may be run from several threads.
template <typename Sizes>
class Remembered
{
public:
    template <typename Function>
    Sizes of(still::Op const& op, std::vector<still::Tensor> const& tensors, Function const& read)
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (!sizes_ || !(tensors == known_))
        {
            sizes_ = read(bind(op, tensors));
            known_ = tensors;
        }
        return *sizes_;
    }

private:
    std::mutex mutex_;
    std::vector<still::Tensor> known_;
    std::optional<Sizes> sizes_;
};

// The longest sequence: sums and products with it stay far from the end of 64 bits.
constexpr int64_t kMostTokens = still::kMaxSize;

// Asserts that the op's inputs are `inputs`, in this order, which its kernel counts on; throws std::logic_error.
void expect_inputs(still::OpSpec const& spec, std::initializer_list<char const*> inputs);

// Place of the attribute's value among its choices.
int choice(still::Op const& op, char const* name);
// The attribute's value; throws still::Error where it is less than `least` or beyond any use.
int integer(still::Op const& op, char const* name, int least);

// The size of a symbol, for those who count in 32 bits; throws still::Error where it is outside least..most.
int dimension(still::Call const& call, char const* symbol, int64_t least = 1, int64_t most = 65536);
// How the call keeps keys and values. Throws still::Error where no kernel reads them so, or scales are missing or too many.
Cache cache_of(still::Call const& call, bool half);
// Throws still::Error unless the query heads H are a multiple of the key/value heads HK.
void check_heads(still::Call const& call);

// Throws still::Error for a row whose counts are outside their range; afterwards their sum fits.
void check_counts(still::OpSpec const& spec, int row, int64_t past, int64_t brought, int64_t tokens);
// The same for all rows, and for those that outgrow the `room` of their state. `past` is null for an op that does not read it.
void check_rows(still::OpSpec const& spec, int batch, int64_t const* past, int64_t const* brought, int64_t tokens,
    int64_t room = std::numeric_limits<int64_t>::max());

// What follows from the shapes of a call of an op with states.
template <typename Layer>
struct StateSizes
{
    Layer layer;
    int batch;
    int64_t tokens;
    still::Tensor output;
};

// The kernel of an op with states and one output, whose calls are computed by a `Layer`.
template <typename Layer>
class StateKernel : public Kernel
{
protected:
    StateKernel(still::Op const& op, bool half, std::initializer_list<char const*> inputs) : op_(op), half_(half)
    {
        expect_inputs(op.spec(), inputs);
    }

    // The layer of a call; throws still::Error where there is no kernel for it.
    virtual Layer read_layer(still::Call const& call) const = 0;

    StateSizes<Layer> sizes(HostCall const& call)
    {
        auto const read = [&](still::Call const& bound) -> StateSizes<Layer>
        {
            Layer const layer = read_layer(bound);
            int const batch = dimension(bound, "B", 0, std::numeric_limits<int32_t>::max());
            return {layer, batch, bound.size("T"), bound.tensor(op_.spec().outputs[0].name.c_str())};
        };
        return sizes_.of(op_, call.tensors, read);
    }

    still::Op const& op_;
    bool half_;

private:
    Remembered<StateSizes<Layer>> sizes_;
};

template <typename Node>
Entry entry_of(char const* op)
{
    return {op, [](still::Op const& made, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(made, half); }};
}

} // namespace still_cpu
