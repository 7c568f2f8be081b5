// What a host asks of an op's kernel on the CPU, and what the kernel asks of a call: tensors, scratch memory, threads.
#pragma once

#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../../core/op.h"
#include "host.h"
#include "instruction_sets.h"

namespace still_cpu
{

// A call as the host gives it. Hosts know tensors by their place among the OpSpec's inputs or outputs, those that are absent counted,
// kernels by their names.
class HostCall : public Host
{
public:
    std::vector<still::Tensor> tensors; // types and shapes of the inputs that exist, in order

    explicit HostCall(still::OpSpec const& op_spec) : spec(op_spec) {}

    // Null where it is absent.
    template <typename T = void>
    T const* input(char const* name)
    {
        return static_cast<T const*>(input_at(place_of(name)));
    }
    int64_t const* counts(char const* name) { return input<int64_t>(name); }

    virtual void* output(size_t place, still::Tensor const& tensor) = 0;

    // The present buffer of the state whose past is this input, holding the past: kernels work in place. Null where it is absent.
    template <typename T = void>
    T* state(char const* past)
    {
        return static_cast<T*>(state_at(place_of(past)));
    }
    // Of rows that may be kept in 8 bits, with the scales that they have then.
    Kept kept(std::string const& past);

protected:
    virtual void* input_at(size_t place) = 0;
    virtual void* state_at(size_t past) = 0;

    still::OpSpec const& spec;

private:
    size_t place_of(char const* input) const; // throws std::logic_error where the op has no such input
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

// The longest sequence: sums and products with it stay far from the end of 64 bits.
constexpr int64_t kMostTokens = still::kMaxSize;

// Place of the attribute's value among its choices.
int choice(still::Op const& op, char const* name);
// The attribute's value; throws still::Error where it is less than `least` or beyond any use.
int integer(still::Op const& op, char const* name, int least);

// The size of a symbol as 32 bits; throws still::Error if it is outside least..most.
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

// The kernel of an op with one output, whose calls are computed by a `Layer`, which follows from their shapes.
template <typename Layer>
class LayerKernel : public Kernel
{
public:
    void compute(HostCall& call) override
    {
        Sizes const sizes = sizes_of(call.tensors);
        run(call, sizes, call.output(0, sizes.output));
    }

protected:
    struct Sizes
    {
        Layer layer;
        int batch;
        int64_t tokens; // of a row
        int64_t all;    // tokens
        still::Tensor output;
    };

    LayerKernel(still::Op const& op, bool half) : op_(op), half_(half) {}

    // Throws still::Error where there is no kernel for the call.
    virtual Layer read_layer(still::Call const& call) const = 0;
    virtual void run(HostCall& call, Sizes const& sizes, void* output) = 0;

    still::Op const& op_;
    bool half_;

private:
    // Of the latest call, as steps are alike; a session may be run from several threads.
    Sizes sizes_of(std::vector<still::Tensor> const& tensors)
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (!sizes_ || !(tensors == known_))
        {
            still::Call const call = bind(op_, tensors);
            int const batch = dimension(call, "B", 0, std::numeric_limits<int32_t>::max());
            sizes_ = {read_layer(call), batch, call.size("T"), call.size("tokens"), call.tensor(op_.spec().outputs[0].name)};
            known_ = tensors;
        }
        return *sizes_;
    }

    std::mutex mutex_;
    std::vector<still::Tensor> known_;
    std::optional<Sizes> sizes_;
};

template <typename Node>
Entry entry_of(char const* op)
{
    return {op, [](still::Op const& made, bool half) -> std::unique_ptr<Kernel> { return std::make_unique<Node>(made, half); }};
}

} // namespace still_cpu
