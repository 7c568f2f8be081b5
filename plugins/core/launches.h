// The launches of one call, and the values that are filled in when they run.
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

// The value of one kernel argument, known now (a number) or at launch (a pointer).
struct Argument
{
    enum class Kind { kNull, kInput, kOutput, kWorkspace, kPersistent, kInteger, kFloat };
    Kind kind{Kind::kNull};
    size_t index{};  // of the input or output; byte offset into the workspace or the persistent memory
    int64_t integer{};
    double real{};
};

// A tensor as rows one behind the other.
struct Matrix
{
    int64_t rows{};
    int64_t columns{};
};

// What a matrix descriptor is made of at launch, besides its address.
struct Descriptor
{
    size_t argument{}; // that is its address, in the launch's order; sizes and strides follow as numbers
    Matrix matrix;
    int element{}; // CUtensorMapDataType
    uint32_t element_bytes{};
    uint32_t box[2]{};
    int swizzle{};
};

struct Launch
{
    enum class Kind { kKernel, kCopy };
    Kind kind{Kind::kKernel};
    CuFunction function{};
    unsigned grid[3]{1, 1, 1};
    unsigned threads{};
    unsigned shared_bytes{};
    std::vector<Argument> arguments; // kernel: in its order; copy: target, source
    std::vector<uint64_t> values;    // of the arguments known now, already in the kernel's width
    std::vector<Descriptor> descriptors;
    size_t bytes{};                  // of a copy
    std::string name;                // for messages
};

struct Launches
{
    std::vector<Launch> all;
    size_t workspace_bytes{};
    size_t persistent_bytes{}; // zeroed once; every launch leaves it zero
};

using Grid = std::array<int64_t, 3>;
using Arguments = std::map<std::string, Argument>;

// Adds a launch and loads its module; an empty grid adds nothing. Arguments are the launch's own, then those of the call; matrices those
// that descriptors are made of.
// Throws still::Error when the kernel takes an argument that is unknown or of another type, or the grid is too large.
void add_launch(Launches& launches, std::string const& op, Kernel const& kernel, Grid const& grid, Arguments const& own,
    Arguments const& of_call, std::map<std::string, Matrix> const& matrices);

// Adds a copy, which is nothing when it runs with both at one address.
void add_copy(Launches& launches, Argument target, Argument source, size_t bytes);

// The function of `kernel` in the current context, loaded once per context; sets its shared memory limit.
CuFunction load_function(Kernel const& kernel);

// Forgets the loaded functions; for tests that replace the driver.
void forget_functions();

// Runs them on `stream`.
void run(Launches const& launches, void const* const* inputs, void* const* outputs, void* workspace, CuDevicePtr persistent,
    CuStream stream);

} // namespace still
