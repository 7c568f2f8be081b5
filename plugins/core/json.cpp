#include "json.h"

#include "error.h"

#include <limits>

namespace still
{
namespace
{

constexpr int kMostDepth = 64; // bounds recursion of readers

[[noreturn]] void wrong(char const* wanted, Json const& value)
{
    fail("JSON: expected ", wanted, ", got ", value.is_structured() ? value.type_name() : value.dump(), ".");
}

template <typename Value>
Value const& taken(char const* wanted, Json const& value)
{
    auto const* const found = value.get_ptr<Value const*>();
    if (!found)
        wrong(wanted, value);
    return *found;
}

} // namespace

Json parse_json(std::string_view text, std::string const& source)
{
    // nlohmann/json skips a byte order mark, and stops at a NUL.
    if (text.substr(0, 3) == "\xef\xbb\xbf" || text.find('\0') != std::string_view::npos)
        fail(source, " is not readable (it has a mark of byte order or a zero).");
    try
    {
        return Json::parse(text.begin(), text.end(), [&](int depth, Json::parse_event_t event, Json const&) {
            if (depth >= kMostDepth && (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start))
                fail(source, " is not readable (nested too deeply).");
            return true;
        });
    }
    catch (Json::exception const& error)
    {
        fail(source, " is not readable (", std::string(error.what()).substr(0, 200), ").");
    }
}

int64_t integer_of(Json const& value)
{
    constexpr auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > most))
        wrong("an integer of 64 bits", value);
    return value.get<int64_t>();
}

std::string const& text_of(Json const& value) { return taken<std::string>("a string", value); }

Json::array_t const& items_of(Json const& value) { return taken<Json::array_t>("an array", value); }

Json::object_t const& members_of(Json const& value) { return taken<Json::object_t>("an object", value); }

} // namespace still
