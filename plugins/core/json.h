// A small JSON reader: the archive's index, a package's manifest. Strict enough to fail on a truncated file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace still
{

class Json
{
public:
    enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

    // Parses a whole document; throws still::Error naming `source` and the byte where the text stops making sense.
    static Json parse(std::string_view text, std::string const& source);

    Kind kind() const { return mKind; }
    bool has(std::string const& name) const { return mKind == Kind::kObject && mMembers.count(name) > 0; }

    // The member `name`; throws when this is no object or has no such member.
    Json const& at(std::string const& name) const;

    // Values; they throw still::Error when the kind differs.
    int64_t integer() const;
    double number() const;
    bool boolean() const;
    std::string const& string() const;
    std::vector<Json> const& items() const;
    std::map<std::string, Json> const& members() const;

    // A number or string as text, for comparing values of either kind.
    std::string text() const;

private:
    friend class JsonReader;
    void expect(Kind kind, char const* what) const;

    Kind mKind{Kind::kNull};
    bool mBool{};
    std::string mString; // a string's value, a number's literal
    std::vector<Json> mItems;
    std::map<std::string, Json> mMembers;
};

} // namespace still
