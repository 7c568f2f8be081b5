// A package's manifest.json: every field that still_run reads, checked once before anything is made of it. All others Python checks.
#pragma once

#include "../core/json.h"

#include <string>

namespace still
{

// The manifest of the package in `folder`. Throws still::Error naming the file and the field that is not what it must be.
Json read_manifest(std::string const& folder);

// The same of a file's content; `source` names the file.
Json parse_manifest(std::string_view text, std::string const& source);

} // namespace still
