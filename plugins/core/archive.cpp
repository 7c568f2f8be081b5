#include "archive.h"

#include "error.h"
#include "json.h"
#include "plan.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

// Defined by archive.S; begin == end if the library was built without kernels.
extern "C" char const still_archive_begin[] __attribute__((visibility("hidden")));
extern "C" char const still_archive_end[] __attribute__((visibility("hidden")));

namespace still
{
namespace
{

constexpr std::string_view kMagic = "STILLAR1";
constexpr char kPackFormat[] = "still-kernels-pack";
constexpr char kIndexFormat[] = "still-kernels-aot";
constexpr int64_t kPackVersion = 1;
constexpr int64_t kIndexVersion = 3;
constexpr int64_t kMaxBox = 256; // the driver's limit
constexpr int64_t kMaxSwizzle = 3;
constexpr int64_t kMaxCluster = 8; // most blocks of a cluster on every GPU with clusters

std::string describe(Key const& key)
{
    std::string text;
    for (auto const& [name, value] : key)
        text += (text.empty() ? "" : " ") + name + "=" + value;
    return text;
}

// For the error: the archive's values of each name in the key that does not match.
std::string difference(std::vector<Variant const*> const& variants, Key const& key)
{
    std::map<std::string, std::set<std::string>> values;
    size_t nearest = key.size() + 1;
    for (Variant const* variant : variants)
    {
        std::map<std::string, std::string> wrong;
        for (auto const& [name, value] : key)
            if (auto const found = variant->key.find(name); found == variant->key.end() || found->second != value)
                wrong[name] = found == variant->key.end() ? "unset" : found->second;
        if (wrong.size() > nearest)
            continue;
        if (wrong.size() < nearest)
            values.clear();
        nearest = wrong.size();
        for (auto const& [name, value] : wrong)
            values[name].insert(value);
    }
    std::string text;
    for (auto const& [name, has] : values)
        text += (text.empty() ? "" : "; ") + name + "=" + key.at(name) + ", the archive has " + joined(has);
    return text;
}

void check_format(Json const& json, std::string const& format, int64_t version, std::string const& source)
{
    if (text_of(json.at("format")) != format || integer_of(json.at("version")) != version)
        fail(source, ": ", text_of(json.at("format")), " version ", integer_of(json.at("version")), "; this library reads ", format,
            " version ", version, ". Build the archive and the library from one version.");
}

// The integer `name` of an index, in least..most. Later casts and memory sizes rely on the range.
int64_t integer(Json const& json, char const* name, int64_t least, int64_t most, std::string const& source)
{
    int64_t const value = integer_of(json.at(name));
    if (value < least || value > most)
        fail(source, ": ", name, "=", value, " is outside ", least, "..", most, "; the archive is damaged.");
    return value;
}

// 90 for "sm_90".
int read_architecture(std::string const& text, std::string const& source)
{
    std::string const digits = text.rfind("sm_", 0) == 0 ? text.substr(3) : "";
    if (digits.empty() || digits.size() > 4 || digits.find_first_not_of("0123456789") != std::string::npos)
        fail(source, ": unknown architecture ", text, ".");
    return std::stoi(digits);
}

KernelArgument read_argument(Json const& json, std::string const& source)
{
    KernelArgument argument{text_of(json.at("name")), text_of(json.at("type")), {}, {}, {}};
    if (argument.type != "descriptor")
        return argument;
    argument.element = text_of(json.at("element"));
    argument.swizzle = static_cast<int>(integer(json, "swizzle", 0, kMaxSwizzle, source));
    auto const& box = items_of(json.at("box"));
    if (box.size() != 2)
        fail(source, ": the descriptor ", argument.name, " has no two dimensions; the archive is damaged.");
    for (size_t i = 0; i < 2; ++i)
    {
        int64_t const size = integer_of(box[i]);
        if (size < 1 || size > kMaxBox)
            fail(source, ": the descriptor ", argument.name, " has blocks of ", size, " rows or columns; the archive is damaged.");
        argument.box[i] = static_cast<uint32_t>(size);
    }
    return argument;
}

Kernel read_kernel(std::string const& name, Json const& json, std::map<std::string, std::string_view> const& cubins, std::string const& source)
{
    Kernel kernel;
    kernel.name = name;
    kernel.symbol = text_of(json.at("symbol"));
    kernel.threads = static_cast<unsigned>(integer(json, "threads", 1, 1024, source));
    kernel.shared_bytes = static_cast<unsigned>(integer(json, "shared_bytes", 0, 1 << 20, source));
    kernel.trailing_nulls = static_cast<size_t>(integer(json, "trailing_null_pointers", 0, 64, source));
    if (json.contains("cluster"))
        kernel.cluster = static_cast<unsigned>(integer(json, "cluster", 1, kMaxCluster, source));
    for (Json const& argument : items_of(json.at("args")))
        kernel.arguments.push_back(read_argument(argument, source));
    auto const cubin = cubins.find(text_of(json.at("cubin")));
    if (cubin == cubins.end())
        fail(source, ": the cubin ", text_of(json.at("cubin")), " of kernel ", name, " is missing.");
    kernel.cubin = cubin->second;
    return kernel;
}

} // namespace

Kernel const& Variant::kernel(std::string const& name) const
{
    auto const found = kernels.find(name);
    if (found == kernels.end())
        fail(op, ": the archive's variant for sm_", architecture, " has no kernel ", name, ". Build the archive and the library from one version.");
    return found->second;
}

int64_t Variant::constant(std::string const& name) const
{
    auto const found = constants.find(name);
    if (found == constants.end())
        fail(op, ": the archive's variant for sm_", architecture, " has no constant ", name, ". Build the archive and the library from one version.");
    return found->second;
}

bool runs_on(int compiled, int device)
{
    // From 9.0 on the cubins are architecture-specific (sm_90a) and run only on that capability.
    if (compiled >= 90)
        return compiled == device;
    return compiled / 10 == device / 10 && compiled <= device;
}

Archive& Archive::get()
{
    static Archive* const archive = [] {
        auto* const made = new Archive; // lives as long as the process: static destructors may launch
        std::string_view const embedded(still_archive_begin, static_cast<size_t>(still_archive_end - still_archive_begin));
        if (!embedded.empty())
            made->add(embedded, "embedded archive");
        return made;
    }();
    return *archive;
}

void Archive::add_file(std::string const& path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file)
        fail("kernel archive ", path, ": cannot be opened.");
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    mFiles.push_back(std::move(bytes));
    add({mFiles.back().data(), mFiles.back().size()}, "kernel archive " + path);
}

void Archive::add(std::string_view bytes, std::string const& source)
{
    try
    {
        read(bytes, source);
    }
    catch (Json::exception const& error)
    {
        fail(source, ": ", error.what(), "; the archive is damaged.");
    }
}

void Archive::read(std::string_view bytes, std::string const& source)
{
    constexpr size_t header = kMagic.size() + sizeof(uint64_t);
    if (bytes.size() < header || bytes.substr(0, kMagic.size()) != kMagic)
        fail(source, ": not an archive of kernels (it does not begin with ", kMagic, ").");
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + kMagic.size(), sizeof(length));
    if (length > bytes.size() - header)
        fail(source, ": truncated; the index has ", length, " bytes, the file ", bytes.size(), ".");
    Json const pack = parse_json(bytes.substr(header, length), source);
    check_format(pack, kPackFormat, kPackVersion, source);
    size_t const blobs = (header + length + 15) / 16 * 16;

    std::map<std::string, std::string_view> cubins;
    for (auto const& [name, place] : members_of(pack.at("cubins")))
    {
        auto const offset = static_cast<uint64_t>(integer_of(place.at("offset")));
        auto const size = static_cast<uint64_t>(integer_of(place.at("size")));
        if (blobs > bytes.size() || offset > bytes.size() - blobs || size > bytes.size() - blobs - offset)
            fail(source, ": truncated; the cubin ", name, " ends at byte ", blobs + offset + size, ", the file has ", bytes.size(), ".");
        cubins[name] = bytes.substr(blobs + offset, size);
    }

    std::deque<Variant> found;
    auto plans = mPlans;
    for (Json const& index : items_of(pack.at("indexes")))
    {
        check_format(index, kIndexFormat, kIndexVersion, source);
        std::string const full = text_of(index.at("op")); // domain, "::" and name of the op
        OpSpec const& spec = op_spec(full.substr(full.rfind(':') + 1));
        if (integer_of(index.at("op_version")) != spec.version)
            fail(source, ": kernels of ", spec.name, " version ", integer_of(index.at("op_version")), "; this library has version ",
                spec.version, ". Build the archive and the library from one version.");
        auto const plan = std::make_shared<Plan const>(index.at("plan"), spec, source);
        auto& known = plans[{spec.name, spec.version}];
        if (known && !(*known == *plan))
            fail(source, ": its launch plan of ", spec.name, " is another one than that of the kernels loaded before. Build all archives ",
                "from one version.");
        known = plan;
        for (Json const& item : items_of(index.at("variants")))
        {
            Variant variant;
            variant.op = spec.name;
            variant.op_version = spec.version;
            variant.architecture = read_architecture(text_of(item.at("arch")), source);
            for (auto const& [name, value] : members_of(item.at("key")))
                variant.key[name] = value.is_string() ? text_of(value) : value.is_boolean() ? (value.get<bool>() ? "1" : "0") : value.dump();
            for (auto const& [name, value] : members_of(item.at("constants")))
                if (value.is_number())
                    variant.constants[name] = integer_of(value);
            for (auto const& [name, kernel] : members_of(item.at("kernels")))
                variant.kernels[name] = read_kernel(name, kernel, cubins, source);
            found.push_back(std::move(variant));
        }
    }
    mPlans = std::move(plans);
    for (Variant& variant : found)
        mVariants.push_back(std::move(variant));
}

void Archive::clear()
{
    mVariants.clear();
    mPlans.clear();
}

Plan const* Archive::plan(std::string const& op, int op_version) const
{
    auto const found = mPlans.find({op, op_version});
    return found == mPlans.end() ? nullptr : found->second.get();
}

std::vector<Variant const*> Archive::all(std::string const& op, int op_version, Key const& key) const
{
    std::vector<Variant const*> known;
    std::vector<Variant const*> fitting;
    for (Variant const& variant : mVariants)
    {
        if (variant.op != op || variant.op_version != op_version)
            continue;
        known.push_back(&variant);
        bool const fits = std::all_of(key.begin(), key.end(), [&](auto const& item) {
            auto const found = variant.key.find(item.first);
            return found != variant.key.end() && found->second == item.second;
        });
        if (fits)
            fitting.push_back(&variant);
    }
    if (mVariants.empty())
        fail(op, ": this library was built without kernels. Build it with -DSTILL_ARCHIVE=FILE.");
    if (known.empty())
        fail(op, ": the archive has no kernel of version ", op_version, " of this op.");
    if (fitting.empty())
        fail(op, ": no kernel for ", difference(known, key), ". Compile the archive for this model (all: ", describe(key), ").");
    return fitting;
}

Variant const& Archive::find(std::string const& op, int op_version, int architecture, Key const& key) const
{
    Variant const* best = nullptr;
    std::set<std::string> architectures;
    for (Variant const* variant : all(op, op_version, key))
    {
        architectures.insert("sm_" + std::to_string(variant->architecture));
        if (runs_on(variant->architecture, architecture) && (!best || variant->architecture > best->architecture))
            best = variant;
    }
    if (!best)
        fail(op, ": the archive has ", joined(architectures), ", the GPU is sm_", architecture, ". Compile the archive for sm_",
            architecture, " too.");
    return *best;
}

} // namespace still
