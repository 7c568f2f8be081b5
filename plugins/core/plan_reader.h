// How a plan is read; of plan.cpp and plan_reader.cpp alone.
#pragma once

#include "plan.h"

namespace still
{

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

} // namespace still
