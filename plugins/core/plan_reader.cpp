// Plans from JSON. What an archive says is checked here, so that running a plan can only fail by its numbers.
#include "error.h"
#include "plan_reader.h"

namespace still
{
namespace
{

constexpr int kMaxNesting = 8;
constexpr size_t kMaxSteps = 4096;   // as written
constexpr size_t kMaxEntries = 1024; // of one list
constexpr size_t kMaxArguments = 64; // of one launch
constexpr size_t kMaxRank = 8;

} // namespace

std::string text_of(Json const& data)
{
    switch (data.kind())
    {
    case Json::Kind::kArray:
    {
        std::string text = "[";
        for (Json const& item : data.items())
            text += text_of(item) + ",";
        return text + "]";
    }
    case Json::Kind::kObject:
    {
        std::string text = "{";
        for (auto const& [name, item] : data.members())
            text += std::to_string(name.size()) + ":" + name + text_of(item) + ",";
        return text + "}";
    }
    default:
    {
        std::string const value = data.text();
        return std::to_string(static_cast<int>(data.kind())) + "'" + std::to_string(value.size()) + ":" + value;
    }
    }
}

Plan::Plan(Json const& data, OpSpec const& spec, std::string const& source) : mSpec(&spec), mText(text_of(data))
{
    Reader(*this, source + ": plan of " + spec.name).read(data);
}

void Plan::Reader::read(Json const& data)
{
    for (auto const& [name, value] : limited(data.at("key").members()))
        mPlan.mKey.emplace(name, Expression(value, mScope));
    for (Json const& item : limited(data.at("checks").items()))
        mPlan.mChecks.push_back(check(item));
    std::vector<std::string> constants;
    for (Json const& name : limited(data.at("constants").items()))
        constants.push_back(name.string());
    mScope.allow_constants(std::move(constants));
    for (Json const& value : limited(data.at("measured_tokens").items()))
        mPlan.mMeasured.push_back(integer(value));
    for (Json const& item : limited(data.at("define").items()))
    {
        if (item.items().size() != 2)
            mScope.refuse("a definition is no pair of name and value");
        Expression value(item.items()[1], mScope);
        size_t const slot = mScope.define(item.items()[0].string(), value.kind());
        mPlan.mDefine.emplace_back(slot, std::move(value));
    }
    for (auto const& [name, value] : limited(data.at("arguments").members()))
        mPlan.mArguments.emplace_back(name, Expression(value, mScope, ValueKind::kReal));
    for (Json const& item : limited(data.at("workspace").items()))
        mPlan.mWorkspace.push_back(region(item));
    for (Json const& item : limited(data.at("persistent").items()))
        mPlan.mPersistent.push_back(region(item));
    for (Json const& item : limited(data.at("aliases").items()))
        mPlan.mAliases.push_back({item.at("name").string(), item.at("tensor").string(), integer(item.at("when"))});
    for (Json const& item : limited(data.at("matrices").items()))
        mPlan.mMatrices.push_back({item.at("tensor").string(), integer(item.at("rows")), integer(item.at("columns"))});
    mPlan.mSteps = steps(data.at("steps"), 0);
    mPlan.mSlots = mScope.slots();
    mPlan.mLeaves = mScope.leaves();
}

template <typename List>
List const& Plan::Reader::limited(List const& list) const
{
    if (list.size() > kMaxEntries)
        mScope.refuse("a list has " + std::to_string(list.size()) + " entries, more than the library takes");
    return list;
}

Plan::Check Plan::Reader::check(Json const& data)
{
    Check check{integer(data.at("condition")), {}};
    for (Json const& part : limited(data.at("message").items()))
    {
        if (part.kind() == Json::Kind::kString)
            check.message.emplace_back(part.string(), std::nullopt);
        else
            check.message.emplace_back("", Expression(part.at("value"), mScope));
    }
    return check;
}

Plan::Region Plan::Reader::region(Json const& data)
{
    Region region{data.at("name").string(), Expression(data.at("element"), mScope, ValueKind::kText), {}, integer(data.at("when"))};
    if (data.at("shape").items().size() > kMaxRank)
        mScope.refuse("the region " + region.name + " has too many dimensions");
    for (Json const& size : data.at("shape").items())
        region.shape.push_back(integer(size));
    return region;
}

std::vector<Plan::Step> Plan::Reader::steps(Json const& data, int depth)
{
    if (depth > kMaxNesting)
        mScope.refuse("steps are nested deeper than the library takes");
    std::vector<Step> result;
    std::vector<std::string> names; // that this body gives
    for (Json const& item : limited(data.items()))
    {
        if (++mSteps > kMaxSteps)
            mScope.refuse("it has more steps than the library takes");
        Step step;
        if (item.has("launch"))
            launch(item, step);
        else if (item.has("let"))
        {
            step.kind = Step::Kind::kLet;
            step.values.emplace_back(item.at("value"), mScope);
            names.push_back(item.at("let").string());
            step.slot = mScope.define(names.back(), step.values[0].kind());
        }
        else if (item.has("loop"))
        {
            step.kind = Step::Kind::kLoop;
            for (char const* bound : {"start", "stop", "step"})
                step.values.push_back(integer(item.at(bound)));
            std::string const& name = item.at("loop").string();
            step.slot = mScope.define(name, ValueKind::kInteger);
            step.body = steps(item.at("body"), depth + 1);
            mScope.forget(name);
        }
        else
        {
            step.kind = Step::Kind::kBranch;
            step.values.push_back(integer(item.at("if")));
            step.body = steps(item.at("then"), depth + 1);
            step.otherwise = steps(item.at("else"), depth + 1);
        }
        result.push_back(std::move(step));
    }
    for (std::string const& name : names)
        mScope.forget(name);
    return result;
}

void Plan::Reader::launch(Json const& data, Step& step)
{
    step.kind = Step::Kind::kLaunch;
    step.name = data.at("launch").string();
    for (Json const& size : data.at("grid").items())
        step.values.push_back(integer(size));
    if (step.values.size() != 3)
        mScope.refuse("the grid of " + step.name + " has no three dimensions");
    for (auto const& [name, value] : data.at("arguments").members())
        step.arguments.emplace_back(name, integer(value));
    if (step.arguments.size() > kMaxArguments)
        mScope.refuse("a launch of " + step.name + " has more arguments than the library takes");
}

} // namespace still
