#include "files.h"

#include "../core/error.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace still
{
namespace
{

using Digest = std::array<unsigned char, 32>;

uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

// The fractional parts of cube roots of the first primes (FIPS 180-4).
constexpr uint32_t kRounds[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351,
    0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3,
    0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_block(uint32_t (&state)[8], unsigned char const* block)
{
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
        w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; ++i)
        w[i] = w[i - 16] + w[i - 7] + (turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3)
            + (turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10);
    uint32_t v[8];
    std::memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; ++i)
    {
        uint32_t const one = v[7] + (turned(v[4], 6) ^ turned(v[4], 11) ^ turned(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRounds[i] + w[i];
        uint32_t const two = (turned(v[0], 2) ^ turned(v[0], 13) ^ turned(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        std::memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += one;
        v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i)
        state[i] += v[i];
}

Digest plain_sha256(unsigned char const* data, size_t bytes)
{
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t const whole = bytes / 64 * 64;
    for (size_t at = 0; at < whole; at += 64)
        add_block(state, data + at);
    unsigned char last[128]{};
    size_t const left = bytes - whole, size = left < 56 ? 64 : 128;
    if (left)
        std::memcpy(last, data + whole, left);
    last[left] = 0x80;
    uint64_t const bits = uint64_t{bytes} * 8;
    for (int i = 0; i < 8; ++i)
        last[size - 1 - static_cast<size_t>(i)] = static_cast<unsigned char>(bits >> 8 * i);
    for (size_t at = 0; at < size; at += 64)
        add_block(state, last + at);
    Digest digest;
    for (size_t i = 0; i < 32; ++i)
        digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

// The user's list of trusted files, also written by still-export (still_export/package/trust.py).
std::string list_path()
{
    char const* const config = std::getenv("XDG_CONFIG_HOME");
    char const* const home = std::getenv("HOME");
    std::string const folder = config && *config ? config : std::string(home ? home : "") + "/.config";
    return folder + "/still-export/trusted-native";
}

bool is_trusted(std::string const& digest)
{
    std::ifstream file(list_path());
    for (std::string line; std::getline(file, line);)
        if (line.substr(0, line.find(' ')) == digest)
            return true;
    return false;
}

} // namespace

void check_name(std::string const& name)
{
    bool good = name.find_first_of(std::string("\\\0", 2)) == std::string::npos && name.find(':') >= name.find('/');
    for (size_t at = 0; good && at <= name.size();)
    {
        size_t const end = std::min(name.find('/', at), name.size());
        std::string const part = name.substr(at, end - at);
        good = !part.empty() && part != "." && part != "..";
        at = end + 1;
    }
    if (!good)
        fail("the manifest names \"", name, "\", which is no file inside the package.");
}

std::string inside(std::string const& folder, std::string const& name)
{
    check_name(name);
    for (size_t end = 0; end != std::string::npos;)
    {
        end = name.find('/', end + 1);
        std::string const path = folder + "/" + name.substr(0, end);
        struct stat found{};
        if (lstat(path.c_str(), &found) == 0 && S_ISLNK(found.st_mode))
            fail(path, " is a symbolic link, which may lead out of the package. Copy the package with its links followed (cp -rL).");
    }
    return folder + "/" + name;
}

std::string sha256(void const* data, size_t bytes)
{
    using Function = unsigned char* (*) (unsigned char const*, size_t, unsigned char*);
    Digest digest;
    // OpenSSL, if installed, uses the processor's SHA instructions; engines have gigabytes.
    static void* const library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    auto const function = library ? reinterpret_cast<Function>(dlsym(library, "SHA256")) : nullptr;
    auto const* const begin = static_cast<unsigned char const*>(data);
    if (!function || !function(begin, bytes, digest.data()))
        digest = plain_sha256(begin, bytes);
    std::string text;
    for (unsigned char const byte : digest)
    {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", byte);
        text += two;
    }
    return text;
}

void check_native(Json const& manifest, std::string const& path, std::string const& name, void const* data, size_t bytes, bool trust)
{
    if (!manifest.at("files").contains(name))
        fail(path, " is not listed in manifest.json, so nothing says what it must be. Export the package again.");
    std::string const digest = sha256(data, bytes);
    if (digest != text_of(manifest.at("files").at(name).at("sha256")))
        fail(path, " is not the file that was exported: its SHA-256 differs from the manifest. Copy the package again.");
    if (is_trusted(digest))
        return;
    if (!trust)
        fail(path, " was not built on this machine, and loading it runs its maker's code. --trust-native allows that, and remembers it.");
    std::ofstream list(list_path(), std::ios::app);
    if (!(list << digest << " " << name << "\n"))
        std::fprintf(stderr, "still_run: %s cannot be written: %s is trusted this once\n", list_path().c_str(), name.c_str());
}

} // namespace still
