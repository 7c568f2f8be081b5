#include "manifest.h"

#include "../core/error.h"
#include "files.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <regex>
#include <set>

namespace still
{

extern char const* const kManifestSchema; // still_export/package/manifest.schema.json

namespace
{

constexpr int64_t kFormatVersion = 2;

template <typename... Parts>
[[noreturn]] void refuse(std::string const& source, std::string const& field, Parts const&... parts)
{
    fail(source, field.empty() ? "" : ": ", field, " ", parts..., ". Copy the package again, or export the model again.");
}

std::string quoted(std::string const& text) { return "'" + text.substr(0, 40) + "'"; }

// A value held against a JSON Schema of the keywords that pydantic writes for manifest.py.
class Schema
{
public:
    Schema(Json const& definitions, std::string const& source) : mDefinitions(definitions), mSource(source) {}

    // Throws unless `value`, which stands at `field`, has `rule`.
    void check(Json const& rule, Json const& value, std::string const& field) const
    {
        std::vector<Json const*> kinds;
        add_branches(rule, kinds);
        auto const own = std::find_if(kinds.begin(), kinds.end(), [&](Json const* kind) { return has_type(*kind, value); });
        if (own == kinds.end() || !fits(**own, value))
        {
            std::string wanted;
            for (Json const* kind : own == kinds.end() ? kinds : std::vector<Json const*>{*own})
                wanted += (wanted.empty() ? "" : " or ") + words(*kind);
            std::string const shown = value.is_structured() ? "one of " + std::to_string(value.size()) + " entries" : value.dump(-1, ' ', true);
            refuse(mSource, field, "must be ", wanted, ", not ", shown.substr(0, 60));
        }
        if (value.is_object())
            members(**own, value, field);
        else if (value.is_array() && (*own)->contains("items"))
            for (size_t i = 0; i < value.size(); ++i)
                check((*own)->at("items"), value[i], field + "[" + std::to_string(i) + "]");
    }

private:
    void members(Json const& rule, Json const& value, std::string const& field) const
    {
        Json const known = rule.value("properties", Json::object()), others = rule.value("additionalProperties", Json(true));
        std::string const prefix = field.empty() ? "" : field + ".";
        for (Json const& name : rule.value("required", Json::array()))
            if (!value.contains(text_of(name)))
                refuse(mSource, prefix + text_of(name), "is missing");
        for (auto const& [name, item] : members_of(value))
            if (known.contains(name))
                check(known.at(name), item, prefix + name);
            else if (others == false)
                refuse(mSource, field, "has ", quoted(name), ", which nothing here knows");
            else if (others.is_object())
                check(others, item, field + "[\"" + name + "\"]");
    }

    void add_branches(Json const& rule, std::vector<Json const*>& kinds) const
    {
        if (rule.contains("$ref"))
        {
            std::string const& name = text_of(rule.at("$ref"));
            add_branches(mDefinitions.at(name.substr(name.rfind('/') + 1)), kinds);
        }
        else if (rule.contains("anyOf"))
            for (Json const& branch : rule.at("anyOf"))
                add_branches(branch, kinds);
        else
            kinds.push_back(&rule);
    }

    static bool has_type(Json const& rule, Json const& value)
    {
        std::string const type = rule.value("type", "");
        return type.empty() || (type == "integer" ? value.is_number_integer() : type == "boolean" ? value.is_boolean() : type == value.type_name());
    }

    // Whether `value`, of the rule's type, has what the rule says of it alone.
    static bool fits(Json const& rule, Json const& value)
    {
        if (rule.contains("minimum") && (value < rule.at("minimum") || value > rule.value("maximum", value)))
            return false;
        if (rule.contains("minLength") && text_of(value).size() < rule.at("minLength"))
            return false;
        if (rule.contains("pattern") && !std::regex_match(text_of(value), std::regex(text_of(rule.at("pattern")))))
            return false;
        if (value.is_array() && (value.size() < rule.value("minItems", size_t{0}) || value.size() > rule.value("maxItems", value.size())))
            return false;
        auto const& known = rule.value("enum", Json::array());
        return rule.value("const", value) == value && (known.empty() || std::find(known.begin(), known.end(), value) != known.end());
    }

    // What `rule` asks for.
    static std::string words(Json const& rule)
    {
        std::string const& type = text_of(rule.at("type"));
        if (rule.contains("const"))
            return rule.at("const").dump();
        if (rule.contains("enum"))
        {
            std::string all;
            for (Json const& one : rule.at("enum"))
                all += (all.empty() ? "" : " or ") + (one.is_string() ? text_of(one) : one.dump());
            return all;
        }
        if (type == "number" && rule.contains("minimum"))
            return "a number from " + rule.at("minimum").dump() + " on";
        if (type == "integer")
            return "an integer in " + rule.at("minimum").dump() + ".." + rule.at("maximum").dump();
        if (type == "array" && rule.contains("minItems"))
            return "a list of " + rule.at("minItems").dump() + (rule.contains("maxItems") ? " to " + rule.at("maxItems").dump() : " or more") + " items";
        if (type == "string")
            return rule.contains("pattern") ? "a text of " + text_of(rule.at("pattern"))
                                            : rule.contains("minLength") ? "a text of a character or more" : "a text";
        return type == "array" ? "a list" : type == "object" ? "an object" : type == "boolean" ? "true or false" : type;
    }

    Json const& mDefinitions;
    std::string const& mSource;
};

void check_shape(Json const& state, std::string const& source, std::string const& field)
{
    Json const& growth = state.at("growth");
    auto const& shape = items_of(state.at("shape"));
    size_t const grown = growth.is_null() ? 0 : growth.at("axis").get<size_t>();
    if (grown >= shape.size())
        refuse(source, field + ".growth.axis", "is ", grown, ", which the shape does not have");
    for (size_t axis = 0; axis < shape.size(); ++axis)
    {
        std::string const name = axis == 0 ? "batch" : axis == grown ? text_of(growth.at("dimension")) : "";
        bool const named = axis == 0 || axis == grown;
        if (shape[axis].is_string() != named || (named && text_of(shape[axis]) != name))
            refuse(source, field + ".shape[" + std::to_string(axis) + "]", "must be ", named ? name : "a number");
    }
}

// What fields of a manifest that has its schema say of each other.
void check_rules(Json const& manifest, std::string const& source)
{
    Json const& model = manifest.at("model");
    if (model.at("layers") != model.at("layer_types").size())
        refuse(source, "model.layer_types", "has ", model.at("layer_types").size(), " entries for ", model.at("layers"), " layers");
    std::set<std::string> names;
    std::map<std::string, Json> growths;
    for (Json const& state : manifest.at("states"))
    {
        std::string const field = "states[" + std::to_string(names.size()) + "]";
        if (!names.insert(text_of(state.at("name"))).second)
            refuse(source, field + ".name", "is that of another state, ", quoted(text_of(state.at("name"))));
        bool const ahead = text_of(state.at("name")).rfind("mtp_", 0) == 0; // of a head, behind the model's layers
        if ((state.at("layer") >= model.at("layers")) != ahead)
            refuse(source, field + ".layer", "is ", state.at("layer"), "; the model has ", model.at("layers"), " layers");
        if (auto const& op = text_of(state.at("op")); !op.empty() && !manifest.at("ops").contains(op))
            refuse(source, field + ".op", "is ", quoted(op), ", which ops does not have");
        check_shape(state, source, field);
        Json const& growth = state.at("growth");
        if (!growth.is_null() && (growth.at("dimension") == "batch" || growths.emplace(text_of(growth.at("dimension")), growth).first->second != growth))
            refuse(source, field + ".growth", "must be the rule of the other states of its dimension");
    }
    auto const& files = members_of(manifest.at("files"));
    for (auto const& [name, entry] : files)
        check_name(name);
    auto const listed = [&](std::string const& field, Json const& name) {
        if (files.find(text_of(name)) == files.end())
            refuse(source, field, "is ", quoted(text_of(name)), ", which files does not list");
    };
    size_t engines = 0;
    for (Json const& engine : manifest.value("engines", Json::array()))
        listed("engines[" + std::to_string(engines++) + "].file", engine.at("file"));
    Json const plugins = manifest.value("plugins", Json::object());
    for (auto const& [major, name] : members_of(plugins))
        listed("plugins[\"" + major + "\"]", name);
    if (Json const native = manifest.value("native", Json()); !native.is_null())
        listed("native.library", native.at("library"));
    if ((engines > 0 || !plugins.empty()) && manifest.value("trt", Json()).is_null())
        refuse(source, "trt", "is missing");
    size_t places = 0;
    if (Json const quantization = manifest.value("quantization", Json()); !quantization.is_null())
        for (Json const& place : quantization.value("adapters", Json::array()))
        {
            std::string const field = "quantization.adapters[" + std::to_string(places++) + "].outputs";
            if (place.at("outputs").size() != place.at("weights").size())
                refuse(source, field, "has not one entry for each of the weights");
        }
}

} // namespace

Json parse_manifest(std::string_view text, std::string const& source)
{
    Json manifest = parse_json(text, source);
    if (Json const version = manifest.is_object() ? manifest.value("format_version", Json()) : Json(); version.is_number_integer() && version != kFormatVersion)
        fail(source, " has format version ", version, "; this program reads ", kFormatVersion, ". Export the model again, or update still_run.");
    static Json const schema = Json::parse(kManifestSchema);
    Schema(schema.at("$defs"), source).check(schema, manifest, "");
    check_rules(manifest, source);
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
