#include "json.h"

#include "error.h"

#include <cerrno>
#include <cstdlib>

namespace still
{

class JsonReader
{
public:
    JsonReader(std::string_view text, std::string const& source) : mText(text), mSource(source) {}

    Json document()
    {
        Json value = read(0);
        skip();
        if (mAt != mText.size())
            stop("text after the end of the document");
        return value;
    }

private:
    [[noreturn]] void stop(char const* why) const { fail(mSource, ": not valid JSON at byte ", mAt, ": ", why, "."); }

    void skip()
    {
        while (mAt < mText.size() && (mText[mAt] == ' ' || mText[mAt] == '\n' || mText[mAt] == '\t' || mText[mAt] == '\r'))
            ++mAt;
    }

    char peek()
    {
        skip();
        if (mAt >= mText.size())
            stop("the text ends early");
        return mText[mAt];
    }

    bool take(char wanted)
    {
        if (peek() != wanted)
            return false;
        ++mAt;
        return true;
    }

    void word(std::string_view wanted)
    {
        if (mText.substr(mAt, wanted.size()) != wanted)
            stop("unknown word");
        mAt += wanted.size();
    }

    Json read(int depth)
    {
        if (depth > 64)
            stop("nested too deeply");
        Json value;
        switch (peek())
        {
        case '{': object(value, depth); break;
        case '[': array(value, depth); break;
        case '"':
            value.mKind = Json::Kind::kString;
            value.mString = string();
            break;
        case 't':
            word("true");
            value.mKind = Json::Kind::kBool;
            value.mBool = true;
            break;
        case 'f':
            word("false");
            value.mKind = Json::Kind::kBool;
            break;
        case 'n': word("null"); break;
        default: number(value);
        }
        return value;
    }

    void object(Json& value, int depth)
    {
        value.mKind = Json::Kind::kObject;
        ++mAt;
        if (take('}'))
            return;
        do
        {
            if (peek() != '"')
                stop("a member's name is missing");
            std::string name = string();
            if (!take(':'))
                stop("':' is missing");
            value.mMembers[name] = read(depth + 1);
        } while (take(','));
        if (!take('}'))
            stop("'}' is missing");
    }

    void array(Json& value, int depth)
    {
        value.mKind = Json::Kind::kArray;
        ++mAt;
        if (take(']'))
            return;
        do
            value.mItems.push_back(read(depth + 1));
        while (take(','));
        if (!take(']'))
            stop("']' is missing");
    }

    void number(Json& value)
    {
        size_t const start = mAt;
        while (mAt < mText.size() && std::string_view("+-.0123456789eE").find(mText[mAt]) != std::string_view::npos)
            ++mAt;
        if (start == mAt)
            stop("a value is missing");
        value.mKind = Json::Kind::kNumber;
        value.mString = std::string(mText.substr(start, mAt - start));
        char* end = nullptr;
        std::strtod(value.mString.c_str(), &end);
        if (*end)
            stop("bad number");
    }

    unsigned hex()
    {
        if (mAt + 4 > mText.size())
            stop("the text ends early");
        unsigned code = 0;
        for (int i = 0; i < 4; ++i)
        {
            char const c = mText[mAt++];
            unsigned digit = 16;
            if (c >= '0' && c <= '9')
                digit = static_cast<unsigned>(c - '0');
            else if (c >= 'a' && c <= 'f')
                digit = static_cast<unsigned>(c - 'a') + 10;
            else if (c >= 'A' && c <= 'F')
                digit = static_cast<unsigned>(c - 'A') + 10;
            if (digit > 15)
                stop("bad \\u escape");
            code = code * 16 + digit;
        }
        return code;
    }

    static void append(std::string& text, unsigned code)
    {
        auto const tail = [&](int shift) { text += static_cast<char>(0x80 | ((code >> shift) & 0x3f)); };
        if (code < 0x80)
            text += static_cast<char>(code);
        else if (code < 0x800)
            text += static_cast<char>(0xc0 | (code >> 6)), tail(0);
        else if (code < 0x10000)
            text += static_cast<char>(0xe0 | (code >> 12)), tail(6), tail(0);
        else
            text += static_cast<char>(0xf0 | (code >> 18)), tail(12), tail(6), tail(0);
    }

    std::string string()
    {
        std::string text;
        ++mAt; // the opening quote
        while (true)
        {
            if (mAt >= mText.size())
                stop("a string is not closed");
            char const c = mText[mAt++];
            if (c == '"')
                return text;
            if (c != '\\')
            {
                text += c;
                continue;
            }
            if (mAt >= mText.size())
                stop("a string is not closed");
            char const escaped = mText[mAt++];
            switch (escaped)
            {
            case 'n': text += '\n'; break;
            case 't': text += '\t'; break;
            case 'r': text += '\r'; break;
            case 'b': text += '\b'; break;
            case 'f': text += '\f'; break;
            case 'u':
            {
                unsigned code = hex();
                if (code >= 0xd800 && code < 0xe000) // half of a character
                {
                    if (code >= 0xdc00 || mText.substr(mAt, 2) != "\\u")
                        stop("half of a \\u pair");
                    mAt += 2;
                    unsigned const low = hex();
                    if (low < 0xdc00 || low > 0xdfff)
                        stop("half of a \\u pair");
                    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                }
                append(text, code);
                break;
            }
            default: text += escaped;
            }
        }
    }

    std::string_view mText;
    std::string const& mSource;
    size_t mAt{};
};

Json Json::parse(std::string_view text, std::string const& source)
{
    return JsonReader(text, source).document();
}

void Json::expect(Kind kind, char const* what) const
{
    if (mKind != kind)
        fail("JSON: expected ", what, ", got ", mString.empty() ? "another kind of value" : mString, ".");
}

Json const& Json::at(std::string const& name) const
{
    expect(Kind::kObject, "an object");
    auto const found = mMembers.find(name);
    if (found == mMembers.end())
        fail("JSON: the member \"", name, "\" is missing.");
    return found->second;
}

int64_t Json::integer() const
{
    expect(Kind::kNumber, "an integer");
    char* end = nullptr;
    errno = 0;
    int64_t const value = std::strtoll(mString.c_str(), &end, 10);
    if (*end || errno == ERANGE)
        fail("JSON: expected an integer of 64 bits, got ", mString, ".");
    return value;
}

double Json::number() const
{
    expect(Kind::kNumber, "a number");
    return std::strtod(mString.c_str(), nullptr);
}

bool Json::boolean() const
{
    expect(Kind::kBool, "true or false");
    return mBool;
}

std::string const& Json::string() const
{
    expect(Kind::kString, "a string");
    return mString;
}

std::vector<Json> const& Json::items() const
{
    expect(Kind::kArray, "an array");
    return mItems;
}

std::map<std::string, Json> const& Json::members() const
{
    expect(Kind::kObject, "an object");
    return mMembers;
}

std::string Json::text() const
{
    if (mKind == Kind::kBool)
        return mBool ? "1" : "0";
    return mString;
}

} // namespace still
