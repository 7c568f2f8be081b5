#include "tokenizer.h"

#include "../core/error.h"

#include <dlfcn.h>

#include <fstream>
#include <iterator>

namespace still
{
namespace
{

struct EncodeResult
{
    int* tokens;
    size_t count;
};

template <typename Function>
Function find(void* library, char const* name)
{
    auto const function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function)
        fail("the tokenizer library has no ", name, "; it is no build of tokenizers-cpp.");
    return function;
}

} // namespace

Tokenizer::Tokenizer(std::string const& library, std::string const& json_path)
{
    std::string const name = library.empty() ? "libtokenizers_c.so" : library;
    mLibrary = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!mLibrary)
        fail("text needs a tokenizer library: ", name, " cannot be opened. Name it with --tokenizer, or pass --prompt-ids.");
    std::ifstream file(json_path, std::ios::binary);
    if (!file)
        fail(json_path, " cannot be opened; pass --prompt-ids.");
    std::string const json((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    mHandle = find<void* (*) (char const*, size_t)>(mLibrary, "tokenizers_new_from_str")(json.data(), json.size());
    if (!mHandle)
        fail(json_path, " is no tokenizer that the library reads.");
}

Tokenizer::~Tokenizer()
{
    if (auto const release = reinterpret_cast<void (*)(void*)>(dlsym(mLibrary, "tokenizers_free")))
        release(mHandle);
}

std::vector<int32_t> Tokenizer::encode(std::string const& text) const
{
    EncodeResult result{};
    find<void (*)(void*, char const*, size_t, int, EncodeResult*)>(mLibrary, "tokenizers_encode")(
        mHandle, text.data(), text.size(), 1, &result);
    std::vector<int32_t> const tokens(result.tokens, result.tokens + result.count);
    if (auto const release = reinterpret_cast<void (*)(EncodeResult*, size_t)>(dlsym(mLibrary, "tokenizers_free_encode_results")))
        release(&result, 1);
    return tokens;
}

std::string Tokenizer::decode(std::vector<int32_t> const& tokens) const
{
    std::vector<uint32_t> const given(tokens.begin(), tokens.end());
    find<void (*)(void*, uint32_t const*, size_t, int)>(mLibrary, "tokenizers_decode")(mHandle, given.data(), given.size(), 1);
    char const* text = nullptr;
    size_t size = 0;
    find<void (*)(void*, char const**, size_t*)>(mLibrary, "tokenizers_get_decode_str")(mHandle, &text, &size);
    return {text, size};
}

} // namespace still
