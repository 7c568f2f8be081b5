// The one exception of the core. Its text is meant for the user: what is wrong, with values; what to do.
#pragma once

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

namespace still
{

class Error : public std::runtime_error
{
public:
    using std::runtime_error::runtime_error;
};

// Joins the parts of a message and throws them as an Error.
template <typename... Parts>
[[noreturn]] void fail(Parts const&... parts)
{
    std::ostringstream text;
    (text << ... << parts);
    std::string said = text.str();
    std::replace(said.begin(), said.end(), '\0', ' '); // where what() would end
    throw Error(said);
}

// "a, b" of texts.
template <typename Texts>
std::string joined(Texts const& texts, char const* between = ", ")
{
    std::string all;
    for (std::string const& text : texts)
        all += (all.empty() ? "" : between) + text;
    return all;
}

} // namespace still
