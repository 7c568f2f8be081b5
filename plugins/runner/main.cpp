// still_run: tokens from a package's TensorRT engine, without Python.
#include "engine.h"

#include "../core/error.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>

namespace
{

constexpr char kUsage[] = R"(usage: still_run PACKAGE --prompt-ids 1,2,3 [--tokens N] [--plugin FILE] [--device N] [--trust-native]

Continues a prompt greedily with the package's TensorRT engine. Token ids on stdout; timings on stderr.
There is no tokenizer and no chat template: still-export run takes text and chats.
  --prompt-ids IDS   token ids, separated by commas
  --tokens N         tokens to generate at most (default 128)
  --plugin FILE      plugin library in the place of the package's
  --device N         CUDA device (default 0)
  --trust-native     load engine and plugin that this machine did not build, and remember them
)";

struct Options
{
    std::string package, ids, plugin;
    long tokens{128};
    int device{};
    bool trust{};
};

struct UsageError
{
    std::string text;
};

long number(std::string const& text, char const* name)
{
    char* end = nullptr;
    long const value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end)
        throw UsageError{std::string(name) + " " + text + " is no number"};
    if (value > INT32_MAX || value < INT32_MIN)
        throw UsageError{std::string(name) + " " + text + " is too large"};
    return value;
}

Options parse(int argc, char** argv)
{
    Options options;
    for (int i = 1; i < argc; ++i)
    {
        std::string const name = argv[i];
        if (name == "--help" || name == "-h")
        {
            std::fputs(kUsage, stdout);
            std::exit(0);
        }
        if (name.rfind("--", 0) != 0)
        {
            options.package = name;
            continue;
        }
        if (name == "--trust-native")
        {
            options.trust = true;
            continue;
        }
        if (name == "--prompt" || name == "--prompt-file" || name == "--chat")
            throw UsageError{name + ": this program has no tokenizer and no chat template, so it takes token ids. Use run_trt.py for text "
                                    "and still-export run --chat for chats, or give --prompt-ids"};
        if (i + 1 == argc)
            throw UsageError{name + " needs a value"};
        std::string const value = argv[++i];
        if (name == "--prompt-ids")
            options.ids = value;
        else if (name == "--plugin")
            options.plugin = value;
        else if (name == "--tokens")
            options.tokens = number(value, "--tokens");
        else if (name == "--device")
            options.device = static_cast<int>(number(value, "--device"));
        else
            throw UsageError{"unknown option " + name};
    }
    if (options.package.empty() || options.ids.empty() || options.tokens < 1)
        throw UsageError{"give a package, --prompt-ids, and at least one token"};
    return options;
}

std::vector<int32_t> ids(std::string const& text)
{
    std::vector<int32_t> tokens;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');)
        tokens.push_back(static_cast<int32_t>(number(part, "--prompt-ids")));
    return tokens;
}

double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run(Options const& options)
{
    std::vector<int32_t> const prompt = ids(options.ids);
    still::Engine engine(options.package, options.plugin, options.device, options.trust);
    if (prompt.empty())
        still::fail("the prompt has no tokens.");
    std::set<int64_t> stops;
    for (still::Json const& item : still::items_of(engine.manifest().at("eos_token_ids")))
        stops.insert(still::integer_of(item));

    engine.start(static_cast<int64_t>(prompt.size()) + options.tokens - 1); // the last token is not fed
    double const begin = seconds();
    std::vector<int32_t> tokens{engine.prefill(prompt)};
    double const first = seconds();
    while (stops.count(tokens.back()) == 0)
    {
        std::printf("%d ", tokens.back());
        std::fflush(stdout);
        if (static_cast<long>(tokens.size()) == options.tokens)
            break;
        tokens.push_back(engine.step());
    }
    std::fputs("\n", stdout);
    std::fflush(stdout); // before the timings, in case both go to one file
    double const spent = seconds() - first;
    std::fprintf(stderr, "[%zu prompt tokens, first token after %.4f s, %.1f tokens/s, state %.1f MiB]\n", prompt.size(), first - begin,
        spent > 0 ? static_cast<double>(tokens.size() - 1) / spent : 0.0, static_cast<double>(engine.state_bytes()) / (1 << 20));
}

} // namespace

int main(int argc, char** argv)
{
    try
    {
        run(parse(argc, argv));
        return 0;
    }
    catch (UsageError const& error)
    {
        std::fprintf(stderr, "still_run: %s\n\n%s", error.text.c_str(), kUsage);
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "still_run: %s\n", error.what());
    }
    return 2;
}
