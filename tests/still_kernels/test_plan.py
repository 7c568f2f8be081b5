"""The language of launch plans: what expressions mean, what is refused, and what a plan becomes for a call."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from still_graphs.errors import ConfigError, UnsupportedError
from still_kernels.attention.spec import ATTENTION
from still_kernels.hybrid_attention.plan.launches import PLAN
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.plan import Alias, Branch, Call, Check, Launch, Let, Loop, Matrix, Plan, Region
from still_kernels.plan.expressions import Scope, compile_expression

SIZES = {"B": 2, "T": 7, "H": 6, "HK": 3, "HS": 6, "D": 64, "P": 48, "F": 96, "C": 32, "N": 80}
ATTRIBUTES = {a.name: a.default for a in HYBRID_ATTENTION.attributes}
CALL = Call(SIZES, ATTRIBUTES, {"block": 5}, "float16", "int32", frozenset({"gate"}), {"feature_q_weight": (1, 48, 64)})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ceil_div(T, 2) * (H + 1) - -3", 31),
        ("-7 // 2", -4),
        ("-7 % 4", 1),
        ("ceil_div(-7, 2)", -3),
        ("min(T, 3, N) + max(1, H)", 9),
        ("pow2(0) + pow2(1) + pow2(5) + pow2(8)", 18),
        ("1 < T <= 7 and not B > 2", 1),
        ("0 and N // 0", 0),
        ("1 or N // 0", 1),
        ("T if B == 2 else N // 0", 7),
        ("overflow == 'error'", 1),
        ("feature_map in ('relu', 'softmax')", 0),
        ("feature_map not in ('relu', 'softmax')", 1),
        ("overflow if has(gate) else dtype", "error"),
        ("has(window_factor) + 2 * has(gate)", 2),
        ("dim(feature_q_weight, 0) + block", 6),
        ("tokens + 100 * rows", 214),
        ("rsqrt(D)", 0.125),
        ("mix_epsilon if mix_epsilon > 0 else rsqrt(D)", 1e-6),
        ("count_dtype", "int32"),
    ],
)
def test_expressions(text: str, value: Any) -> None:
    scope = Scope(HYBRID_ATTENTION, ("block",))
    expression = compile_expression(text, scope, "any")
    assert expression(CALL.environment()) == value
    assert json.loads(json.dumps(expression.data)) == expression.data


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("T +", "no expression"),
        ("X + 1", "the name X is unknown"),
        ("block + 1", "the name block is unknown"),
        ("T / 2", "nothing like this"),
        ("T ** 2", "nothing like this"),
        ("True", "nothing like this"),
        ("open(1)", "no function open"),
        ("T.real", "nothing like this"),
        ("[T][0]", "nothing like this"),
        ("overflow + 1", "is of type text"),
        ("overflow < 'error'", "do not compare"),
        ("overflow == 1", "do not compare"),
        ("1 if T else overflow", "two sides"),
        ("rsqrt(D) + 1", "is of type real"),
        ("has(nothing)", "takes a tensor"),
        ("dim(gate)", "takes a tensor of the op and an axis"),
        ("pow2(1, 2)", "no function pow2 of 2 values"),
        ("overflow", "integer is needed"),
        ("+".join(["T"] * 300), "larger"),
    ],
)
def test_expressions_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        compile_expression(text, Scope(HYBRID_ATTENTION))


def test_a_plan_of_a_call() -> None:
    plan = Plan(
        ATTENTION,
        constants=("block",),
        define={"blocks": "ceil_div(T, block)"},
        types={"wide": "'float32' if dtype == 'float32' else 'bfloat16'"},
        workspace=(Region("part", "wide", ("B", "blocks", "D")), Region("same", "T", ("N",), when="T == 1")),
        persistent=(Region("counters", "int32", ("B",), when="T > 1"),),
        aliases=(Alias("scores", "present_key", when="T > 1"),),
        matrices=(Matrix("key", "tokens", "HK * D"), Matrix("part", "B * blocks", "D")),
        arguments={"T": "T", "scale": "rsqrt(D)"},
        steps=(
            Loop("first", "0", "blocks", "2", (Let("count", "min(2, blocks - first)"), Launch("a", ("count", "H", "B"), f="first"))),
            Branch("T == 1", (Launch("b", ("1", "1", "1")),), (Launch("c", ("N - 80", "1", "1")),)),
        ),
    )  # fmt: skip
    sizes = {name: SIZES[name] for name in ("B", "T", "H", "HK", "D", "N")}
    made = plan.evaluate(Call(sizes, {}, {"block": 2}, "float16", "int32"))
    assert [(b.name, b.element, b.shape) for b in made.workspace] == [("part", "bfloat16", (2, 4, 64))]
    assert [b.shape for b in made.persistent] == [(2,)] and made.aliases == {"scores": "present_key"}
    assert made.arguments == {"T": 7, "scale": 0.125}
    assert made.matrices == {"key": (14, 192), "part": (8, 64)}
    assert [(s.kernel, s.grid, s.arguments) for s in made.steps] == [
        ("a", (2, 6, 2), {"f": 0}),
        ("a", (2, 6, 2), {"f": 2}),
    ]  # c has an empty grid
    elements = plan.element_types(Call(sizes, {}, dtype="float32", count_dtype="int64"))
    assert elements["part"] == elements["key"] == elements["present_key"] == elements["scores"] == "float32"
    assert not plan.evaluate(Call({**sizes, "T": 0}, {}, {"block": 2}, "float16", "int32")).steps


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"define": {"T": "1"}}, "the name T is taken"),
        ({"define": {"a b": "1"}}, "is no name"),
        ({"constants": ("N",)}, "names that are taken: N"),
        ({"key": {"a": "block"}, "constants": ("block",)}, "the name block is unknown"),
        ({"workspace": (Region("a", "float8", ("T",)),)}, "unknown type float8"),
        ({"steps": (Loop("i", "0", "1", "1", ()), Launch("a", ("i", "1", "1")))}, "the name i is unknown"),
        ({"matrices": (Matrix("key", "tokens", "nothing"),)}, "the name nothing is unknown"),
        ({"checks": (Check("T", "{nothing} is wrong"),)}, "the name nothing is unknown"),
    ],
)
def test_plans_that_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Plan(**{"spec": ATTENTION, "steps": (), **changes}).data  # noqa: B018


def test_steps_nested_too_deeply_are_refused() -> None:
    steps: tuple[Any, ...] = ()
    for depth in range(10):
        steps = (Loop(f"i{depth}", "0", "1", "1", steps),)
    with pytest.raises(ConfigError, match="nested deeper"):
        Plan(ATTENTION, steps).data  # noqa: B018


def test_a_region_exists_once() -> None:
    plan = Plan(ATTENTION, (), workspace=(Region("a", "T", (1,)), Region("a", "T", (2,), when="T > 1")))
    sizes = {name: SIZES[name] for name in ("B", "T", "H", "HK", "D", "N")}
    with pytest.raises(ConfigError, match="exists twice"):
        plan.evaluate(Call(sizes, {}, {}, "float16", "int32"))


def test_checks_come_in_order_and_say_values() -> None:
    PLAN.check(replace(CALL, attributes=ATTRIBUTES | {"chunk_size": 32}))
    wrong = Call({**SIZES, "HK": 4, "HS": 5}, ATTRIBUTES | {"chunk_size": 32}, present=frozenset({"gate"}))
    with pytest.raises(UnsupportedError, match="query has H=6 heads, which is no multiple of HK=4 of key"):
        PLAN.check(wrong)


def test_keys_leave_out_what_is_not_known() -> None:
    whole = PLAN.key_of(CALL)
    assert whole["head_dim"] == 64 and whole["gate"] == 1
    part = PLAN.key_of(Call({}, ATTRIBUTES, present=frozenset({"gate"})))
    assert set(whole) - set(part) == {"dtype", "count_dtype", "head_dim", "feature_rows"}
    assert part.items() <= whole.items()


def test_calls_from_shapes() -> None:
    """Weights of one head say nothing of H; heads may lie side by side; an unknown dimension is left out."""
    shapes = {
        "query": (0, 0, 384),
        "key": (-1, 5, 3, 64),
        "feature_q_weight": (1, 48, 64),
        "past_window_key": (2, 3, 64, 64),
    }
    call = Call.of(HYBRID_ATTENTION, shapes, ATTRIBUTES, "float16", "int32")
    assert call.sizes == {"T": 5, "HK": 3, "D": 64, "P": 48, "B": 2, "C": 32, "H": 6}
    assert "window_key" in call.present and "gate" not in call.present
    both = Call.of(ATTENTION, {"key": (2, 7, 3, 64), "past_key": (2, 3, 80, 64)}, {}, None, None)
    assert both.shapes["key"] == (2, 7, 3, 64) and both.sizes["N"] == 80
