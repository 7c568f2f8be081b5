// JSON of the archive's index and of a package's manifest: nlohmann/json without silent conversions.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace still
{

using Json = nlohmann::json;

// A whole document. Throws still::Error with `source` if the text is no JSON, or nested deeper than 64.
Json parse_json(std::string_view text, std::string const& source);

// Values; they throw still::Error if `value` has another kind.
int64_t integer_of(Json const& value);
std::string const& text_of(Json const& value);
Json::array_t const& items_of(Json const& value);
Json::object_t const& members_of(Json const& value);

} // namespace still
