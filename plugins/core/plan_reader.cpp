// Reads plans from JSON. All checks of an archive's content are here; running a plan can only fail by its numbers.
#include "error.h"
#include "json.h"
#include "plan.h"

namespace still
{
namespace
{

constexpr int kMaxNesting = 8;
constexpr size_t kMaxSteps = 4096;   // in the source, loops not unrolled
constexpr size_t kMaxEntries = 1024; // of one list
constexpr size_t kMaxArguments = 64; // of one launch

} // namespace

class Plan::Reader
{
public:
    Reader(Plan& plan, std::string where) : mPlan(plan), mScope(*plan.mSpec, std::move(where)) {}

    void read(Json const& data);

private:
    template <typename List>
    List const& limited(List const& list) const; // refuses a list that is too long
    Expression integer(Json const& data) { return {data, mScope, ValueKind::kInteger}; }
    Check check(Json const& data);
    Region region(Json const& data);
    std::vector<Step> steps(Json const& data, int depth);
    void launch(Json const& data, Step& step);

    Plan& mPlan;
    Scope mScope;
    size_t mSteps{};
};

Plan::Plan(Json const& data, OpSpec const& spec, std::string const& source) : mSpec(&spec), mText(data.dump())
{
    Reader(*this, source + ": plan of " + spec.name).read(data);
}

void Plan::Reader::read(Json const& data)
{
    for (auto const& [name, value] : limited(members_of(data.at("key"))))
        mPlan.mKey.emplace(name, Expression(value, mScope));
    for (Json const& item : limited(items_of(data.at("checks"))))
        mPlan.mChecks.push_back(check(item));
    std::vector<std::string> constants;
    for (Json const& name : limited(items_of(data.at("constants"))))
        constants.push_back(text_of(name));
    mScope.allow_constants(std::move(constants));
    for (Json const& value : limited(items_of(data.at("measured_tokens"))))
        mPlan.mMeasured.push_back(integer(value));
    for (Json const& item : limited(items_of(data.at("define"))))
    {
        if (items_of(item).size() != 2)
            mScope.refuse("a definition is no pair of name and value");
        Expression value(items_of(item)[1], mScope);
        size_t const slot = mScope.define(text_of(items_of(item)[0]), value.kind());
        mPlan.mDefine.emplace_back(slot, std::move(value));
    }
    for (auto const& [name, value] : limited(members_of(data.at("arguments"))))
        mPlan.mArguments.emplace_back(name, Expression(value, mScope, ValueKind::kReal));
    for (Json const& item : limited(items_of(data.at("workspace"))))
        mPlan.mWorkspace.push_back(region(item));
    for (Json const& item : limited(items_of(data.at("persistent"))))
        mPlan.mPersistent.push_back(region(item));
    for (Json const& item : limited(items_of(data.at("aliases"))))
        mPlan.mAliases.push_back({text_of(item.at("name")), text_of(item.at("tensor")), integer(item.at("when"))});
    for (Json const& item : limited(items_of(data.at("matrices"))))
        mPlan.mMatrices.push_back({text_of(item.at("tensor")), integer(item.at("rows")), integer(item.at("columns"))});
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
    for (Json const& part : limited(items_of(data.at("message"))))
    {
        if (part.is_string())
            check.message.emplace_back(text_of(part), std::nullopt);
        else
            check.message.emplace_back("", Expression(part.at("value"), mScope));
    }
    return check;
}

Plan::Region Plan::Reader::region(Json const& data)
{
    Region region{text_of(data.at("name")), Expression(data.at("element"), mScope, ValueKind::kText), {}, integer(data.at("when"))};
    if (items_of(data.at("shape")).size() > kMaxRank)
        mScope.refuse("the region " + region.name + " has too many dimensions");
    for (Json const& size : items_of(data.at("shape")))
        region.shape.push_back(integer(size));
    return region;
}

std::vector<Plan::Step> Plan::Reader::steps(Json const& data, int depth)
{
    if (depth > kMaxNesting)
        mScope.refuse("steps are nested deeper than the library takes");
    std::vector<Step> result;
    std::vector<std::string> names; // defined by this body
    for (Json const& item : limited(items_of(data)))
    {
        if (++mSteps > kMaxSteps)
            mScope.refuse("it has more steps than the library takes");
        Step step;
        if (item.contains("launch"))
            launch(item, step);
        else if (item.contains("let"))
        {
            step.kind = Step::Kind::kLet;
            step.values.emplace_back(item.at("value"), mScope);
            names.push_back(text_of(item.at("let")));
            step.slot = mScope.define(names.back(), step.values[0].kind());
        }
        else if (item.contains("loop"))
        {
            step.kind = Step::Kind::kLoop;
            for (char const* bound : {"start", "stop", "step"})
                step.values.push_back(integer(item.at(bound)));
            std::string const& name = text_of(item.at("loop"));
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
    step.name = text_of(data.at("launch"));
    for (Json const& size : items_of(data.at("grid")))
        step.values.push_back(integer(size));
    if (step.values.size() != 3)
        mScope.refuse("the grid of " + step.name + " needs three dimensions");
    for (auto const& [name, value] : members_of(data.at("arguments")))
        step.arguments.emplace_back(name, integer(value));
    if (step.arguments.size() > kMaxArguments)
        mScope.refuse("a launch of " + step.name + " has more arguments than the library takes");
}

} // namespace still
