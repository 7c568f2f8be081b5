#include "manifest.h"

#include "../core/error.h"
#include "files.h"

#include <algorithm>
#include <fstream>
#include <iterator>

namespace still
{
namespace
{

constexpr int64_t kFormatVersion = 2;
constexpr int64_t kMostRows = int64_t{1} << 24;
constexpr int64_t kWhole = (int64_t{1} << 31) - 1;

// A value of the manifest and where it stands, for messages.
class Field
{
public:
    Field(Json const& value, std::string const& source, std::string const& path) : mValue(&value), mSource(&source), mPath(path) {}

    Field at(std::string const& name) const
    {
        expect(Json::Kind::kObject, "an object");
        if (!mValue->has(name))
            fail(*mSource, ": ", join(name), " is missing. Copy the package again, or export the model again.");
        return {mValue->at(name), *mSource, join(name)};
    }

    std::vector<Field> items() const
    {
        expect(Json::Kind::kArray, "a list");
        std::vector<Field> fields;
        for (Json const& item : mValue->items())
            fields.emplace_back(item, *mSource, mPath + "[" + std::to_string(fields.size()) + "]");
        return fields;
    }

    int64_t integer(int64_t least, int64_t most) const
    {
        std::string const wanted = "an integer in " + std::to_string(least) + ".." + std::to_string(most);
        expect(Json::Kind::kNumber, wanted.c_str());
        int64_t value = 0;
        try
        {
            value = mValue->integer();
        }
        catch (Error const&)
        {
            wrong(wanted.c_str());
        }
        if (value < least || value > most)
            wrong(wanted.c_str());
        return value;
    }

    std::string const& string() const
    {
        expect(Json::Kind::kString, "a text");
        return mValue->string();
    }

    bool boolean() const
    {
        expect(Json::Kind::kBool, "true or false");
        return mValue->boolean();
    }

    Json::Kind kind() const { return mValue->kind(); }
    Json const& json() const { return *mValue; }

    [[noreturn]] void wrong(char const* wanted) const
    {
        fail(*mSource, ": ", mPath, " must be ", wanted, ", not ", mValue->text().substr(0, 60), ". Copy the package again, or export the model again.");
    }

private:
    void expect(Json::Kind kind, char const* wanted) const
    {
        if (mValue->kind() != kind)
            wrong(wanted);
    }
    std::string join(std::string const& name) const { return mPath.empty() ? name : mPath + "." + name; }

    Json const* mValue;
    std::string const* mSource;
    std::string mPath;
};

void check_state(Field const& state)
{
    state.at("name").string();
    std::string const& dtype = state.at("dtype").string();
    if (dtype != "float32" && dtype != "float16" && dtype != "bfloat16" && dtype != "int32")
        state.at("dtype").wrong("float32, float16, bfloat16 or int32");
    auto const shape = state.at("shape").items();
    if (shape.size() < 2 || shape.size() > 8)
        state.at("shape").wrong("of 2 to 8 dimensions");
    Field const growth = state.at("growth");
    bool const grows = growth.kind() != Json::Kind::kNull;
    if (grows)
    {
        growth.at("axis").integer(1, static_cast<int64_t>(shape.size()) - 1);
        growth.at("rows").integer(0, kMostRows);
        growth.at("per").integer(1, kMostRows);
        growth.at("lag").integer(0, kMostRows);
        growth.at("fixed").boolean();
    }
    for (size_t axis = 0; axis < shape.size(); ++axis)
        if (shape[axis].kind() == Json::Kind::kNumber)
            shape[axis].integer(1, kMostRows);
        else if (shape[axis].string() != "batch" && !(grows && shape[axis].string() == growth.at("dimension").string()))
            shape[axis].wrong("a number, batch or the dimension that grows");
}

void check_engine(Field const& engine)
{
    check_name(engine.at("file").string());
    engine.at("size_bytes").integer(1, int64_t{1} << 62);
    engine.at("tensorrt").string();
    engine.at("prefill_tokens").integer(1, kMostRows);
    engine.at("stripped").boolean();
    auto const built = engine.at("archs").items();
    if (built.empty())
        engine.at("archs").wrong("a list of architectures");
    for (Field const& architecture : built)
        architecture.string();
}

} // namespace

std::string read_file(std::string const& path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file)
        fail(path, " cannot be opened.");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void check_manifest(Json const& manifest, std::string const& source)
{
    Field const root(manifest, source, "");
    int64_t const version = root.at("format_version").integer(1, kWhole);
    if (version != kFormatVersion)
        fail(source, " has format version ", version, "; this program reads ", kFormatVersion, ". Export the model again, or update still_run.");
    if (root.at("target").string() != "trt")
        fail(source, " is of a package for ", root.at("target").string(), "; still_run needs one exported with --to trt.");
    root.at("trt").at("version_compatible").boolean();
    Field const model = root.at("model");
    model.at("vocab_size").integer(1, kWhole);
    model.at("all_logits").boolean();
    Field const capacity = root.at("capacity");
    capacity.at("capacity_tokens").integer(1, int64_t{1} << 40);
    capacity.at("bounded").boolean();
    for (Field const& token : root.at("eos_token_ids").items())
        token.integer(0, kWhole);
    for (Field const& state : root.at("states").items())
        check_state(state);
    for (Field const& engine : root.at("engines").items())
        check_engine(engine);
    for (auto const& [name, entry] : root.at("files").json().members())
    {
        check_name(name);
        Field const file(entry, source, "files." + name);
        file.at("size_bytes").integer(0, int64_t{1} << 62);
        std::string const& digest = file.at("sha256").string();
        if (digest.size() != 64 || digest.find_first_not_of("0123456789abcdef") != std::string::npos)
            file.at("sha256").wrong("64 hexadecimal digits");
    }
}

Json read_manifest(std::string const& folder)
{
    std::string const path = inside(folder, "manifest.json");
    Json manifest = Json::parse(read_file(path), path);
    check_manifest(manifest, path);
    return manifest;
}

} // namespace still
