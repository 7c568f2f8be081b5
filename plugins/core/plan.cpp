#include "plan.h"

#include "error.h"
#include "op.h"

#include <algorithm>

namespace still
{
namespace
{

constexpr size_t kMaxWork = size_t{1} << 18; // steps of one call, loops unrolled

int64_t times(int64_t a, int64_t b)
{
    int64_t result = 0;
    if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result))
        fail("a launch plan needs a buffer of ", a, " times ", b, " elements or bytes.");
    return result;
}

int64_t element_bytes(std::string_view element)
{
    if (element == "int8")
        return 1;
    for (Type const type : {Type::kFloat32, Type::kFloat16, Type::kBFloat16, Type::kInt32, Type::kInt64})
        if (element == type_name(type))
            return static_cast<int64_t>(type_bytes(type));
    fail("a launch plan has a buffer of the unknown type ", std::string(element), ".");
}

void set(Environment& environment, std::map<size_t, Leaf> const& leaves, Leaf::Source source, char const* name, int64_t value)
{
    for (auto const& [slot, leaf] : leaves)
        if (leaf.source == source && leaf.name == name)
            environment[slot] = {true, value, 0.0, {}};
}

Argument find(std::vector<TensorSpec const*> const& tensors, std::string const& name, Argument::Kind kind)
{
    for (size_t i = 0; i < tensors.size(); ++i)
        if (tensors[i]->name == name)
            return {kind, i, 0, 0.0};
    return {};
}

Argument number(Expression const& expression, Environment const& environment)
{
    if (expression.kind() == ValueKind::kInteger)
        return {Argument::Kind::kInteger, 0, expression.integer(environment), 0.0};
    return {Argument::Kind::kFloat, 0, 0, expression.real(environment)};
}

bool empty(Call const& call) { return call.size("B") == 0 || call.size("T") == 0 || call.size("tokens") == 0; }

} // namespace

struct Plan::Run
{
    Call const& call;
    Variant const& variant;
    Environment environment;
    Arguments arguments;
    std::map<std::string, Matrix> matrices;
    Launches& made;
    size_t work{};
};

Environment Plan::environment(Call const& call, Variant const* variant) const
{
    Environment environment(mSlots);
    for (auto const& [slot, leaf] : mLeaves)
    {
        Value& value = environment[slot];
        switch (leaf.source)
        {
        case Leaf::Source::kSize:
            if (call.knows(leaf.name))
                value = {true, call.size(leaf.name), 0.0, {}};
            break;
        case Leaf::Source::kAttribute:
        {
            AttributeValue const& attribute = call.attributes->at(leaf.name);
            value = {true, attribute.integer, attribute.real, attribute.text};
            break;
        }
        case Leaf::Source::kConstant:
            if (variant)
                value = {true, variant->constant(leaf.name), 0.0, {}};
            break;
        case Leaf::Source::kHas: value = {true, call.has(leaf.name), 0.0, {}}; break;
        case Leaf::Source::kDim:
            if (call.has(leaf.name))
                value = {true, call.tensor(leaf.name).dims[leaf.axis], 0.0, {}};
            break;
        case Leaf::Source::kCall:
            if (leaf.name == "dtype" || leaf.name == "count_dtype")
            {
                Type const type = leaf.name == "dtype" ? call.activation : call.count;
                if (type != Type::kNone)
                    value = {true, 0, 0.0, type_name(type)};
            }
            else if (call.knows(leaf.name))
                value = {true, call.size(leaf.name), 0.0, {}};
        }
    }
    return environment;
}

void Plan::define(Environment& environment) const
{
    for (auto const& [slot, value] : mDefine)
        environment[slot] = value.value(environment);
}

void Plan::check(Call const& call) const
{
    Environment const environment = this->environment(call, nullptr);
    for (Check const& check : mChecks)
    {
        if (check.condition.integer(environment))
            continue;
        std::string text;
        for (auto const& [literal, value] : check.message)
            text += value ? value->shown(environment) : literal;
        call.refuse(text);
    }
}

Key Plan::key(Call const& call) const
{
    Environment const environment = this->environment(call, nullptr);
    Key key;
    for (auto const& [name, value] : mKey)
        if (value.known(environment))
            key[name] = value.shown(environment);
    return key;
}

void Plan::regions(
    std::vector<Region> const& from, Environment const& environment, Argument::Kind kind, size_t& bytes, Arguments* names) const
{
    int64_t total = 0;
    for (Region const& region : from)
    {
        if (!region.when.integer(environment))
            continue;
        int64_t size = element_bytes(region.element.text(environment));
        for (Expression const& dim : region.shape)
            size = times(size, dim.integer(environment));
        if (names)
        {
            Argument& argument = (*names)[region.name];
            if (argument.kind != Argument::Kind::kNull)
                fail(mSpec->name, ": the launch plan has two of the buffer ", region.name, ".");
            argument = {kind, static_cast<size_t>(total), 0, 0.0};
        }
        if (__builtin_add_overflow(size, 255, &size) || __builtin_add_overflow(total, size / 256 * 256, &total))
            fail(mSpec->name, ": the launch plan needs more memory than there is.");
    }
    bytes = static_cast<size_t>(total);
}

size_t Plan::workspace_bytes(Call const& largest, Variant const& variant) const
{
    if (empty(largest))
        return 0;
    int64_t const batch = largest.size("B");
    int64_t const tokens = largest.size("T");
    int64_t const all = largest.size("tokens");
    Environment environment = this->environment(largest, &variant);
    size_t most = 0;
    auto const measure = [&](int64_t rows, int64_t row_tokens, int64_t all_tokens) {
        Environment changed = environment;
        set(changed, mLeaves, Leaf::Source::kSize, "B", rows);
        set(changed, mLeaves, Leaf::Source::kSize, "T", row_tokens);
        set(changed, mLeaves, Leaf::Source::kCall, "tokens", all_tokens);
        set(changed, mLeaves, Leaf::Source::kCall, "rows", rows);
        define(changed);
        size_t bytes = 0;
        regions(mWorkspace, changed, Argument::Kind::kWorkspace, bytes, nullptr);
        most = std::max(most, bytes);
    };
    for (Expression const& expression : mMeasured)
    {
        int64_t const row_tokens = expression.integer(environment);
        // A plan may split a call by its rows, so that fewer rows need more workspace.
        for (int64_t rows = 1; row_tokens >= 1 && row_tokens <= tokens && rows <= batch; ++rows)
            measure(rows, row_tokens, times(rows, row_tokens));
    }
    measure(batch, tokens, all);
    return most;
}

Arguments Plan::arguments(Call const& call, Environment const& environment, Launches& made) const
{
    Arguments names;
    // The kernels update the present state in place. An input has priority over a state with its name.
    for (TensorSpec const& output : mSpec->outputs)
    {
        names[output.name] = find(*call.outputs, output.name, Argument::Kind::kOutput);
        if (output.state)
            names[state_name(output.name)] = names[output.name];
    }
    for (TensorSpec const& input : mSpec->inputs)
        if (!input.state)
            names[input.name] = find(*call.inputs, input.name, Argument::Kind::kInput);
    for (auto const* all : {&mWorkspace, &mPersistent})
        for (Region const& region : *all)
            names[region.name] = {};
    regions(mWorkspace, environment, Argument::Kind::kWorkspace, made.workspace_bytes, &names);
    regions(mPersistent, environment, Argument::Kind::kPersistent, made.persistent_bytes, &names);
    for (Alias const& alias : mAliases)
    {
        auto const tensor = names.find(alias.tensor);
        if (tensor == names.end())
            fail(mSpec->name, ": the launch plan has an alias of the unknown tensor ", alias.tensor, ".");
        Argument const value = tensor->second;
        Argument& named = names[alias.name];
        if (alias.when.integer(environment))
            named = value;
    }
    for (auto const& [name, value] : mArguments)
        names[name] = number(value, environment);
    return names;
}

void Plan::steps(std::vector<Step> const& steps, Run& run) const
{
    for (Step const& step : steps)
    {
        if (++run.work > kMaxWork)
            run.call.refuse("its launch plan has more than " + std::to_string(kMaxWork) + " steps. Split the call.");
        auto const value = [&](size_t i) { return step.values[i].integer(run.environment); };
        switch (step.kind)
        {
        case Step::Kind::kLet: run.environment[step.slot] = step.values[0].value(run.environment); break;
        case Step::Kind::kBranch: this->steps(value(0) ? step.body : step.otherwise, run); break;
        case Step::Kind::kLoop:
        {
            int64_t const stop = value(1);
            int64_t const stride = value(2);
            if (stride < 1)
                run.call.refuse("its launch plan has a loop with a step of " + std::to_string(stride) + ".");
            for (int64_t at = value(0); at < stop;)
            {
                if (++run.work > kMaxWork)
                    run.call.refuse("its launch plan has more than " + std::to_string(kMaxWork) + " steps. Split the call.");
                run.environment[step.slot] = {true, at, 0.0, {}};
                this->steps(step.body, run);
                if (__builtin_add_overflow(at, stride, &at))
                    break;
            }
            break;
        }
        case Step::Kind::kLaunch:
        {
            Arguments own;
            for (auto const& [name, expression] : step.arguments)
                own[name] = number(expression, run.environment);
            Grid const grid{value(0), value(1), value(2)};
            add_launch(run.made, mSpec->name, run.variant.kernel(step.name), grid, own, run.arguments, run.matrices);
        }
        }
    }
}

Launches Plan::launches(Call const& call, Variant const& variant) const
{
    Launches made;
    for (TensorSpec const* output : *call.outputs)
        if (output->state)
            add_copy(made, find(*call.outputs, output->name, Argument::Kind::kOutput),
                find(*call.inputs, "past_" + state_name(output->name), Argument::Kind::kInput), call.tensor(output->name).bytes());
    if (empty(call))
        return made;
    Run run{call, variant, environment(call, &variant), {}, {}, made};
    define(run.environment);
    run.arguments = arguments(call, run.environment, made);
    for (View const& view : mMatrices)
        run.matrices[view.tensor] = {times(view.rows.integer(run.environment), 1), times(view.columns.integer(run.environment), 1)};
    steps(mSteps, run);
    return made;
}

} // namespace still
