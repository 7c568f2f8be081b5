// A package's manifest.json: checks every field that still_run reads before use. Python checks the others.
#pragma once

#include "../core/json.h"

#include <string>

namespace still
{

// The manifest of the package in `folder`. Throws still::Error with the file and the invalid field.
Json read_manifest(std::string const& folder);

// The same for a file's content; `source` names the file.
Json parse_manifest(std::string_view text, std::string const& source);

} // namespace still
