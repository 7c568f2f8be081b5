// JSON of the archive's index and of a package's manifest: nlohmann/json, strict where it would convert in silence.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace still
{

using Json = nlohmann::json;

// A whole document; throws still::Error naming `source` where the text is no JSON, or has more than 64 lists and objects in one another.
Json parse_json(std::string_view text, std::string const& source);

// Values; they throw still::Error where `value` is of another kind.
int64_t integer_of(Json const& value);
std::string const& text_of(Json const& value);
Json::array_t const& items_of(Json const& value);
Json::object_t const& members_of(Json const& value);

} // namespace still
