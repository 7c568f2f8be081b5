// The archive of ahead-of-time kernels: an index followed by the cubins, embedded in the library or read from a file.
//
// File: "STILLAR1", uint64 length of the index, the index (JSON), padding to 16 bytes, the cubins. Integers are little-endian.
// A variant serves one call: all kernels of an op, compiled for one architecture and one key.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace still
{

using Key = std::map<std::string, std::string>; // name -> number or text, as written in the index

struct KernelArgument
{
    std::string name;
    std::string type; // "ptr", "i32", "i64", "f32", "descriptor"

    // For descriptors: element type, rows and columns of a block, and its layout in shared memory (CUtensorMapSwizzle).
    // A wider block is copied in parts of this size.
    std::string element;
    uint32_t box[2]{};
    int swizzle{};
};

struct Kernel
{
    std::string name;
    std::string symbol; // entry point in the cubin
    unsigned threads{}; // of a block
    unsigned shared_bytes{};
    size_t trailing_nulls{}; // pointers to scratch memory of size 0
    unsigned cluster{1};     // blocks of a cluster along x, according to the cubin
    std::vector<KernelArgument> arguments;
    std::string_view cubin;
};

class Plan;

struct Variant
{
    std::string op;
    int op_version{};
    int architecture{}; // 90 for sm_90
    Key key;
    std::map<std::string, int64_t> constants; // sizes in the plan's expressions
    std::map<std::string, Kernel> kernels;

    Kernel const& kernel(std::string const& name) const; // throws still::Error if it is missing
    int64_t constant(std::string const& name) const;     // likewise
};

class Archive
{
public:
    // The archive of this process: the embedded one, plus added ones.
    static Archive& get();

    // Adds the kernels of a file, which stays in memory. Throws still::Error for a missing, damaged or unknown file.
    void add_file(std::string const& path);

    // Adds the kernels of `bytes`, which must stay alive. `source` names them in errors.
    void add(std::string_view bytes, std::string const& source);

    // The launch plan of the op; null if the archive has none.
    Plan const* plan(std::string const& op, int op_version) const;

    // Removes every kernel; for tests.
    void clear();

    // The variant of the op with this key for the architecture; a key may omit unknown properties.
    // Throws still::Error that lists what the archive has.
    Variant const& find(std::string const& op, int op_version, int architecture, Key const& key) const;

    // Every variant of the op with this key, for any architecture.
    std::vector<Variant const*> all(std::string const& op, int op_version, Key const& key) const;

    std::deque<Variant> const& variants() const { return mVariants; }

private:
    void read(std::string_view bytes, std::string const& source);

    std::vector<std::vector<char>> mFiles;
    std::map<std::pair<std::string, int>, std::shared_ptr<Plan const>> mPlans; // by op and its version
    std::deque<Variant> mVariants; // addresses stay valid
};

// Whether a cubin of `compiled` runs on `device`.
bool runs_on(int compiled, int device);

} // namespace still
