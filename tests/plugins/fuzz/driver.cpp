// main() of a fuzz target where libFuzzer is not: inputs from a seed, so that a finding is repeated by its number.
//
//   fuzz_NAME [--seed N] [--first N] [--runs N] [--seconds N] [--text] [FILE ...]
//
// Input i is made from seed and i alone: of the FILEs, changed in some places, or of random bytes. --text changes numbers and values of
// JSON as well as bytes. Prints what ran; the number of each input before it runs goes to the file STILL_FUZZ_AT, where that is set.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size);

namespace
{

using Random = std::mt19937_64;

size_t below(Random& random, size_t count)
{
    return count ? static_cast<size_t>(random() % count) : 0;
}

char const* const kValues[] = {"0", "-1", "1", "9223372036854775807", "-9223372036854775808", "9223372036854775808", "1e999", "2147483648",
    "4294967297", "-2147483649", "0.5", "null", "true", "[]", "{}", "\"\"", "\"sm_\"", "\"sm_99999999999\"", "[[]]", "\"\\ud800\"", "1000000"};

// The end of the JSON value that begins at `begin`, or `begin` where none does.
size_t value_end(std::string const& text, size_t begin)
{
    int depth = 0;
    bool quoted = false;
    for (size_t i = begin; i < text.size(); ++i)
    {
        char const c = text[i];
        if (quoted)
        {
            if (c == '\\')
                ++i;
            else if (c == '"')
                quoted = false;
            if (!quoted && depth == 0)
                return i + 1;
            continue;
        }
        if (c == '"')
            quoted = true;
        else if (c == '{' || c == '[')
            ++depth;
        else if (c == '}' || c == ']')
        {
            if (depth == 0)
                return i;
            if (--depth == 0)
                return i + 1;
        }
        else if (c == ',' && depth == 0)
            return i;
    }
    return begin;
}

void change_value(std::string& text, Random& random)
{
    size_t const colon = text.find_first_of(":[,", below(random, text.size()));
    if (colon == std::string::npos)
        return;
    size_t const begin = colon + 1, end = value_end(text, begin);
    if (end <= begin)
        return;
    switch (below(random, 4))
    {
    case 0: text.erase(begin, end - begin); break;
    case 1: text.insert(end, "," + text.substr(begin, end - begin)); break;
    default: text.replace(begin, end - begin, kValues[below(random, std::size(kValues))]);
    }
}

void change_bytes(std::string& text, Random& random)
{
    size_t const at = below(random, text.size() + 1), span = 1 + below(random, 16);
    switch (below(random, 5))
    {
    case 0:
        if (at < text.size())
            text[at] = static_cast<char>(text[at] ^ (1 << below(random, 8)));
        break;
    case 1: text.erase(at, span); break;
    case 2: text.insert(at, std::string(span, static_cast<char>(random()))); break;
    case 3: text.insert(at, text.substr(below(random, text.size() + 1), span)); break;
    default: text.resize(at);
    }
}

std::string make(std::vector<std::string> const& files, bool json, uint64_t seed, uint64_t number)
{
    std::seed_seq mixed{seed, seed >> 32, number, number >> 32};
    Random random(mixed);
    std::string input;
    if (files.empty())
    {
        for (size_t left = 16 + below(random, 600); left; --left)
            input += static_cast<char>(random());
        return input;
    }
    input = files[below(random, files.size())];
    for (size_t changes = number == 0 ? 0 : 1 + below(random, 4); changes; --changes)
        json && below(random, 4) ? change_value(input, random) : change_bytes(input, random);
    return input;
}

} // namespace

int main(int argc, char** argv)
{
    uint64_t seed = 1, first = 0, runs = 10000;
    double seconds = 0;
    bool json = false;
    std::vector<std::string> files;
    for (int i = 1; i < argc; ++i)
    {
        std::string const name = argv[i];
        char const* const value = i + 1 < argc ? argv[i + 1] : "0";
        if (name == "--text")
            json = true;
        else if (name == "--seed")
            seed = std::strtoull(value, nullptr, 10), ++i;
        else if (name == "--first")
            first = std::strtoull(value, nullptr, 10), ++i;
        else if (name == "--runs")
            runs = std::strtoull(value, nullptr, 10), ++i;
        else if (name == "--seconds")
            seconds = std::strtod(value, nullptr), runs = UINT64_MAX, ++i;
        else
        {
            std::ifstream file(name, std::ios::binary);
            if (!file)
            {
                std::fprintf(stderr, "%s cannot be read\n", argv[i]);
                return 2;
            }
            files.emplace_back((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        }
    }
    char const* const at = std::getenv("STILL_FUZZ_AT");
    std::FILE* const where = at ? std::fopen(at, "w") : nullptr;
    double spent = 0;
    uint64_t done = 0;
    for (; done < runs && (seconds == 0 || spent < seconds); ++done)
    {
        if (where)
        {
            std::rewind(where);
            std::fprintf(where, "%020" PRIu64 "\n", first + done);
            std::fflush(where);
        }
        std::string const input = make(files, json, seed, first + done);
        LLVMFuzzerTestOneInput(reinterpret_cast<uint8_t const*>(input.data()), input.size());
        spent = static_cast<double>(std::clock()) / CLOCKS_PER_SEC; // of the processor: others may have it too
    }
    if (where)
        std::fclose(where);
    std::printf("{\"seed\": %" PRIu64 ", \"first\": %" PRIu64 ", \"runs\": %" PRIu64 ", \"seconds\": %.1f}\n", seed, first, done, spent);
    return 0;
}
