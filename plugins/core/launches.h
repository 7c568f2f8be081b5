// A plan: the launches of one call, built by an op's planner, and the values that a launch fills in.
#pragma once

#include "archive.h"
#include "driver.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace still
{

class Call;

// The value of one kernel argument, known now (a number) or at launch (a pointer).
struct Argument
{
    enum class Kind { kNull, kInput, kOutput, kWorkspace, kPersistent, kInteger, kFloat };
    Kind kind{Kind::kNull};
    size_t index{};  // of the input or output; byte offset into the workspace or the persistent memory
    int64_t integer{};
    double real{};
};

struct Step
{
    enum class Kind { kKernel, kCopy };
    Kind kind{Kind::kKernel};
    CuFunction function{};
    unsigned grid[3]{1, 1, 1};
    unsigned threads{};
    unsigned shared_bytes{};
    std::vector<Argument> arguments; // kernel: in its order; copy: target, source
    std::vector<uint64_t> values;    // of the arguments known now, already in the kernel's width
    size_t bytes{};                  // of a copy
    std::string name;                // for messages
};

struct Plan
{
    std::vector<Step> steps;
    size_t workspace_bytes{};
    size_t persistent_bytes{}; // zeroed once; every launch leaves it zero
};

// What a planner writes into. Argument values go by name; the archive says which a kernel takes and in what order.
class PlanBuilder
{
public:
    PlanBuilder(Call const& call, Variant const& variant) : mCall(call), mVariant(variant) {}

    using Arguments = std::map<std::string, Argument>;
    using Grid = std::array<int64_t, 3>;

    Argument input(std::string const& name) const;  // null where the optional input is absent
    Argument output(std::string const& name) const; // likewise
    Argument region(size_t bytes);                  // of the workspace, 256-byte aligned
    Argument persistent(size_t bytes);              // zeroed once, owned by the op instance, 256-byte aligned
    static Argument number(int64_t value);
    static Argument real(double value);

    // Adds a launch; an empty grid adds nothing. Throws still::Error when the archive has no such kernel, it takes an argument
    // that is not given or of another type, or the grid is too large.
    void kernel(std::string const& name, Grid const& grid, Arguments const& arguments);

    void copy(Argument target, Argument source, size_t bytes); // nothing at launch when both are one address

    Plan take() { return std::move(mPlan); }

private:
    Call const& mCall;
    Variant const& mVariant;
    Plan mPlan;
};

// What only an op knows. One object per op, without state.
class Planner
{
public:
    virtual ~Planner() = default;

    // Throws still::Error where no kernel covers the call, whatever the archive holds.
    virtual void check(Call const& call) const = 0;

    // Key of the archive's variant; of a call whose sizes or types are not known yet, the part that is.
    virtual Key key(Call const& call) const = 0;

    // Bytes for any call whose sizes are at most these.
    virtual size_t workspace_bytes(Call const& largest, Variant const& variant) const = 0;

    virtual void plan(Call const& call, Variant const& variant, PlanBuilder& builder) const = 0;
};

// The planner of an op; throws still::Error for an op without kernels.
Planner const& planner(std::string const& op);

// The function of `kernel` in the current context, loaded once per context; sets its shared memory limit.
CuFunction load_function(Kernel const& kernel);

// Forgets the loaded functions; for tests that replace the driver.
void forget_functions();

// Device memory, zeroed, in the context that is current when it is made.
class ZeroedMemory
{
public:
    explicit ZeroedMemory(size_t bytes);
    ~ZeroedMemory();
    ZeroedMemory(ZeroedMemory const&) = delete;
    ZeroedMemory& operator=(ZeroedMemory const&) = delete;
    CuDevicePtr address() const { return mAddress; }
    size_t bytes() const { return mBytes; }

private:
    CuDevicePtr mAddress{};
    size_t mBytes{};
};

// Runs a plan on `stream`.
void run(Plan const& plan, void const* const* inputs, void* const* outputs, void* workspace, CuDevicePtr persistent,
    CuStream stream);

} // namespace still
