// An archive of kernels: bytes as a file has them, or an index alone, which is wrapped so that damage reaches what reads it.
#include "../core/archive.h"
#include "../core/error.h"

#include <cstring>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    std::string bytes(reinterpret_cast<char const*>(data), size);
    if (bytes.rfind("STILLAR1", 0) != 0)
    {
        uint64_t const length = bytes.size();
        std::string head = "STILLAR1" + std::string(sizeof length, '\0');
        std::memcpy(&head[8], &length, sizeof length);
        bytes = head + bytes;
        bytes.resize((bytes.size() + 15) / 16 * 16 + 64, 'x');
    }
    // Of exactly this size, so that the sanitizer sees a step over the end.
    std::vector<char> const exact(bytes.begin(), bytes.end());
    still::Archive archive;
    try
    {
        archive.add({exact.data(), exact.size()}, "input");
    }
    catch (still::Error const&)
    {
        return 0;
    }
    for (still::Variant const& variant : archive.variants())
    {
        for (auto const& [name, kernel] : variant.kernels)
        {
            // What the driver would be given must lie in the file.
            volatile char last = kernel.cubin.empty() ? '\0' : kernel.cubin.back();
            static_cast<void>(last);
            if (kernel.threads == 0 || kernel.threads > 1024 || kernel.trailing_nulls > 64)
                __builtin_trap();
        }
        try
        {
            archive.find(variant.op, variant.op_version, 90, variant.key);
        }
        catch (still::Error const&)
        {
        }
    }
    return 0;
}
