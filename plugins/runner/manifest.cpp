#include "manifest.h"

#include "../core/error.h"
#include "files.h"

#include <fstream>
#include <iterator>
#include <limits>

namespace still
{
namespace
{

constexpr int64_t kFormatVersion = 2;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr size_t kMostDimensions = 8;

// A value that this program reads, with its path for messages.
class Field
{
public:
    Field(Json const& value, std::string const& source, std::string place = {}) : mValue(value), mSource(source), mPlace(std::move(place)) {}

    template <typename... Parts>
    [[noreturn]] void refuse(Parts const&... parts) const
    {
        fail(mSource, mPlace.empty() ? "" : ": ", mPlace, " ", parts..., ". Copy the package again, or export the model again.");
    }

    bool has(char const* name) const { return mValue.is_object() && mValue.contains(name) && !mValue.at(name).is_null(); }

    Field at(char const* name) const
    {
        if (!mValue.is_object())
            refuse("must be an object");
        Field const found(has(name) ? mValue.at(name) : mValue, mSource, mPlace.empty() ? name : mPlace + "." + name);
        if (!has(name))
            found.refuse("is missing");
        return found;
    }

    std::vector<Field> items() const
    {
        if (!mValue.is_array())
            refuse("must be a list");
        std::vector<Field> found;
        for (Json const& item : mValue)
            found.emplace_back(item, mSource, mPlace + "[" + std::to_string(found.size()) + "]");
        return found;
    }

    std::vector<std::pair<std::string, Field>> members() const
    {
        if (!mValue.is_object())
            refuse("must be an object");
        std::vector<std::pair<std::string, Field>> found;
        for (auto const& [name, item] : members_of(mValue))
            found.emplace_back(name, Field(item, mSource, mPlace + "[\"" + name + "\"]"));
        return found;
    }

    bool is_text() const { return mValue.is_string(); }

    std::string const& text() const
    {
        if (!is_text())
            refuse("must be a text");
        return text_of(mValue);
    }

    int64_t integer(int64_t least, int64_t most = kMost) const
    {
        if (!mValue.is_number_integer() || mValue < least || mValue > most)
            refuse("must be an integer in ", least, "..", most);
        return integer_of(mValue);
    }

    void flag() const
    {
        if (!mValue.is_boolean())
            refuse("must be true or false");
    }

private:
    Json const& mValue;
    std::string const& mSource;
    std::string mPlace;
};

void check_state(Field const& state)
{
    state.at("name").text();
    state.at("dtype").text();
    bool const grows = state.has("growth");
    if (grows)
    {
        Field const growth = state.at("growth");
        growth.at("per").integer(1);
        growth.at("lag").integer(0);
        growth.at("rows").integer(0);
        growth.at("fixed").flag();
    }
    auto const shape = state.at("shape").items();
    if (shape.empty() || shape.size() > kMostDimensions)
        state.at("shape").refuse("must have 1 to ", kMostDimensions, " sizes");
    for (Field const& size : shape)
        if (!size.is_text())
            size.integer(1);
        else if (size.text() != "batch" && !grows)
            size.refuse("must be a number, as the state has no growth");
}

void check_engine(Field const& engine, Field const& files)
{
    Field const file = engine.at("file");
    if (!files.has(file.text().c_str()))
        file.refuse("is '", file.text().substr(0, 40), "', which files does not list");
    engine.at("size_bytes").integer(0, std::numeric_limits<int64_t>::max());
    engine.at("tensorrt").text();
    engine.at("prefill_tokens").integer(1);
    if (engine.has("stripped"))
        engine.at("stripped").flag();
    if (engine.at("archs").items().empty())
        engine.at("archs").refuse("has no architecture");
    for (Field const& arch : engine.at("archs").items())
        arch.text();
}

} // namespace

Json parse_manifest(std::string_view text, std::string const& source)
{
    Json manifest = parse_json(text, source);
    if (Json const version = manifest.is_object() ? manifest.value("format_version", Json()) : Json(); version.is_number_integer() && version != kFormatVersion)
        fail(source, " has format version ", version, "; this program reads ", kFormatVersion, ". Export the model again, or update still_run.");
    Field const whole(manifest, source);
    whole.at("target").text();
    for (Field const& id : whole.at("eos_token_ids").items())
        id.integer(0);
    whole.at("model").at("vocab_size").integer(1);
    whole.at("model").at("all_logits").flag();
    whole.at("capacity").at("capacity_tokens").integer(0, kMostTokens);
    whole.at("capacity").at("bounded").flag();
    for (Field const& state : whole.at("states").items())
        check_state(state);
    for (auto const& [name, entry] : whole.at("files").members())
    {
        check_name(name);
        entry.at("sha256").text();
    }
    if (whole.has("speculate"))
        whole.at("speculate").integer(0);
    if (whole.has("engines"))
        for (Field const& engine : whole.at("engines").items())
        {
            check_engine(engine, whole.at("files"));
            whole.at("trt").at("version_compatible").flag();
        }
    return manifest;
}

Json read_manifest(std::string const& folder)
{
    std::string const path = inside(folder, "manifest.json");
    std::ifstream file(path, std::ios::binary);
    if (!file)
        fail(path, " cannot be opened.");
    return parse_manifest(std::string{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}, path);
}

} // namespace still
