// The only exception of the core. Its text is for the user: the fault, with values, and the remedy.
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

// Joins the parts of a message and throws an Error.
template <typename... Parts>
[[noreturn]] void fail(Parts const&... parts)
{
    std::ostringstream text;
    (text << ... << parts);
    std::string said = text.str();
    std::replace(said.begin(), said.end(), '\0', ' '); // a NUL would end what()
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
