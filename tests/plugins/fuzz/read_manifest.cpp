// What still_run says of manifests, one after another, for tests that compare readers: each comes as a line with its length in bytes and
// these bytes, and is answered by a line; an empty one: accepted.
#include "core/error.h"
#include "runner/manifest.h"

#include <iostream>

int main()
{
    size_t size = 0;
    while (std::cin >> size && std::cin.get() == '\n')
    {
        std::string text(size, '\0');
        std::cin.read(text.data(), static_cast<std::streamsize>(size));
        std::string said;
        try
        {
            still::parse_manifest(text, "manifest.json");
        }
        catch (still::Error const& error)
        {
            said = error.what();
        }
        for (char& c : said)
            c = c == '\n' ? ' ' : c;
        std::cout << said << std::endl;
    }
}
