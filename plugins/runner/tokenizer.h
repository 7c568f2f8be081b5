// Text through the package's tokenizer.json, when a tokenizer library with the C interface of tokenizers-cpp is on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace still
{

class Tokenizer
{
public:
    // Opens `library`, or libtokenizers_c.so where it is empty; throws still::Error when it or `json_path` cannot be read.
    Tokenizer(std::string const& library, std::string const& json_path);
    ~Tokenizer();
    Tokenizer(Tokenizer const&) = delete;
    Tokenizer& operator=(Tokenizer const&) = delete;

    std::vector<int32_t> encode(std::string const& text) const;
    std::string decode(std::vector<int32_t> const& tokens) const;

private:
    void* mLibrary{};
    void* mHandle{};
};

} // namespace still
