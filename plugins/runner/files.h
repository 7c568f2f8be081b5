// The files of a package: inside its folder, unchanged; native code only if the user's own list has it.
#pragma once

#include "../core/json.h"

#include <string>

namespace still
{

// Throws still::Error unless `name` is a plain relative path that stays below its folder.
void check_name(std::string const& name);

// The path of a package's file. Throws still::Error for a symbolic link on the way, which may lead out of the folder.
std::string inside(std::string const& folder, std::string const& name);

// SHA-256, hexadecimal.
std::string sha256(void const* data, size_t bytes);

// Throws still::Error unless the manifest lists `name` with the SHA-256 of these bytes, and the user's list of native files has it, too
// (this machine built the file, or the user trusted it). `trust` adds it to the list.
void check_native(Json const& manifest, std::string const& path, std::string const& name, void const* data, size_t bytes, bool trust);

} // namespace still
