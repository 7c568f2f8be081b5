// A package's manifest as still_run reads it, and the sizes of its states for few and for many tokens.
#include "core/error.h"
#include "runner/files.h"
#include "runner/manifest.h"
#include "runner/states.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    std::string const text(reinterpret_cast<char const*>(data), size);
    try
    {
        still::Json const manifest = still::parse_manifest(text, "input");
        for (int64_t const tokens : {int64_t{1}, int64_t{257}, still::integer_of(manifest.at("capacity").at("capacity_tokens"))})
            for (still::State const& state : still::states_for(manifest, tokens))
                if (still::size_bytes(state) == 0 || state.shape.size() > 8)
                    std::abort(); // what passes must be what the engine's buffers are made for
        for (still::Json const& engine : manifest.value("engines", still::Json::array()))
            still::inside("/nowhere", still::text_of(engine.at("file")));
    }
    catch (still::Error const&)
    {
    }
    if (still::sha256(data, size).size() != 64)
        std::abort();
    return 0;
}
