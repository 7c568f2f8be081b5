// A package's manifest.json as still_run needs it: every field checked once, before anything is made of it.
#pragma once

#include "../core/json.h"

#include <string>

namespace still
{

// The manifest of the package in `folder`. Throws still::Error naming the file and the field that is not what it must be.
Json read_manifest(std::string const& folder);

// The same for a manifest that was parsed; `source` names the file.
void check_manifest(Json const& manifest, std::string const& source);

// Content of a file; throws still::Error where it cannot be read.
std::string read_file(std::string const& path);

} // namespace still
