// A launch plan: the launches of one op's call, from the archive's index; see docs/reference/plan.md for its parts.
#pragma once

#include "expression.h"
#include "launches.h"

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace still
{

class Call;

class Plan
{
public:
    // Reads and checks the plan of `spec`; `source` names the archive in errors.
    Plan(Json const& data, OpSpec const& spec, std::string const& source);

    // Throws still::Error if no kernel covers the call in any archive.
    void check(Call const& call) const;

    // Key of the archive's variant; without properties that depend on unknown sizes or types.
    Key key(Call const& call) const;

    // Bytes of workspace for any call whose sizes are at most these.
    size_t workspace_bytes(Call const& largest, Variant const& variant) const;

    // The launches of this call; loads the modules. A state with different past and present buffers is copied first.
    Launches launches(Call const& call, Variant const& variant) const;

    bool operator==(Plan const& other) const { return mText == other.mText; }

private:
    struct Region
    {
        std::string name;
        Expression element; // text, such as "float32"
        std::vector<Expression> shape;
        Expression when;
    };

    struct Check
    {
        Expression condition;
        std::vector<std::pair<std::string, std::optional<Expression>>> message; // text, then a value
    };

    struct Alias
    {
        std::string name;
        std::string tensor;
        Expression when;
    };

    struct View
    {
        std::string tensor;
        Expression rows;
        Expression columns;
    };

    struct Step
    {
        enum class Kind { kLaunch, kLet, kLoop, kBranch };
        Kind kind{};
        std::string name; // of the kernel
        size_t slot{};    // of the name that let or loop defines
        std::vector<Expression> values; // launch: grid; let: value; loop: start, stop, step; branch: condition
        std::vector<std::pair<std::string, Expression>> arguments;
        std::vector<Step> body;
        std::vector<Step> otherwise;
    };

    class Reader;
    struct Run; // the evaluation of one call

    Environment environment(Call const& call, Variant const* variant) const;
    void define(Environment& environment) const;
    void regions(std::vector<Region> const& from, Environment const& environment, Argument::Kind kind, size_t& bytes, Arguments* names) const;
    Arguments arguments(Call const& call, Environment const& environment, Launches& made) const;
    void steps(std::vector<Step> const& steps, Run& run) const;

    OpSpec const* mSpec;
    std::string mText; // of the data, for comparison
    size_t mSlots{};
    std::map<size_t, Leaf> mLeaves;
    std::map<std::string, Expression> mKey;
    std::vector<Check> mChecks;
    std::vector<std::pair<size_t, Expression>> mDefine;
    std::vector<std::pair<std::string, Expression>> mArguments;
    std::vector<Region> mWorkspace;
    std::vector<Region> mPersistent;
    std::vector<Alias> mAliases;
    std::vector<View> mMatrices;
    std::vector<Expression> mMeasured;
    std::vector<Step> mSteps;
};

} // namespace still
