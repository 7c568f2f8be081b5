"""Launch plans in the core: numbers as in Python, errors where they do not fit 64 bits, and archives whose plan is damaged."""

import copy
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from still_kernels.hybrid_attention.plan.launches import PLAN
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.plan import Branch, Call, Launch, Let, Loop, Plan, Region
from still_kernels.plan.expressions import Scope, compile_expression
from tests.plugins.core_abi import Core, CoreError, CoreOp, Recorder
from tests.plugins.test_core import ABSENT, ATTRIBUTES, CONSTANTS, HYBRID, add, addresses, inputs, made, variant

NAMES = (
    "T",
    "N",
    "H",
    "chunk_size",
    "mid",
    "big",
    "tokens",
    "has(gate)",
    "dim(feature_q_weight, 1)",
    "salient_per_chunk",
)
DEFINE = {"mid": "ceil_div(N, 3) - 40", "big": "N * N * N * N * N * N * 1000000"}
WRONG = "division or overflow"
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod},
    **{"<": operator.lt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne},
}


def number(rng: random.Random, depth: int) -> str:
    """The text of a random integer expression."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([*NAMES, str(rng.randrange(-3, 9)), str(10 ** rng.randrange(19))])
    a, b, c = (number(rng, depth - 1) for _ in range(3))
    choices = [f"({a} {op} {b})" for op in ("+", "-", "*", "//", "%", "<", ">=", "==", "!=", "and", "or")]
    choices += [f"{f}({a}, {b})" for f in ("min", "max", "ceil_div")]
    choices += [f"pow2({a})", f"(not {a})", f"({a} if {b} else {c})", f"(rsqrt({a}) < rsqrt({b}))"]
    choices += [
        f"({a} if {rng.choice(['overflow', 'saliency'])} == {rng.choice(['overflow', repr('error')])} else {b})"
    ]
    return rng.choice(choices)


def exact(data: Any, env: dict[str, Any]) -> Any:
    """What an expression is worth in 64 bits, from its data, or ArithmeticError. Written apart from both evaluators."""
    if isinstance(data, int):
        return data
    name, *parts = data
    if name == "text":
        return parts[0]
    if name == "has":
        return int(parts[0] in env["present"])
    if name == "dim":
        return env["shapes"][parts[0]][parts[1]]
    if name in ("size", "attribute", "constant", "value", "call"):
        return env[f"{name} {parts[0]}"]
    if name in ("and", "or", "if"):
        first = exact(parts[0], env)
        if name == "if":
            return exact(parts[1 if first else 2], env)
        return int(
            bool(first) and bool(exact(parts[1], env)) if name == "and" else bool(first) or bool(exact(parts[1], env))
        )
    a, b = (*(exact(part, env) for part in parts), None)[:2]
    if (name in ("//", "%", "ceil_div") and b <= 0) or (name == "rsqrt" and a <= 0):
        raise ArithmeticError(WRONG)
    compare: dict[str, Callable[[], Any]] = {
        "ceil_div": lambda: (a + b - 1) // b,
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
        "rsqrt": lambda: a**-0.5,
        "pow2": lambda: next(1 << i for i in range(99) if 1 << i >= a),
        "not": lambda: int(not a),
    }
    value = compare[name]() if name in compare else OPERATORS[name](a, b)
    value = int(value) if isinstance(value, bool) else value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ArithmeticError(WRONG)
    return value


def op_with(core: Core, folder: Path, data: dict[str, Any], **kernels: list[str]) -> CoreOp:
    """An op whose archive has the plan `data` and kernels with these arguments ("name:type")."""
    entry = variant()
    for name, arguments in kernels.items():
        entry["kernels"][name] = {
            **entry["kernels"]["score"],
            "symbol": f"{name}_kernel",
            "args": [dict(zip(("name", "type"), a.split(":"), strict=True)) for a in arguments],
        }
    core.call("still_clear_archive")
    add(core, folder, entry, plan=data)
    return made(core)


def test_expressions_are_worth_what_they_are_in_python(core: Core, recorder: Recorder, tmp_path: Path) -> None:
    """200 expressions in one launch, 60 that are errors one by one."""
    rng = random.Random(3)
    scope = Scope(HYBRID_ATTENTION, PLAN.constants, {"mid": "integer", "big": "integer"})
    call = Call.of(
        HYBRID_ATTENTION,
        {name: shape for name, (_, shape) in zip(names_of(), inputs(), strict=True)},
        ATTRIBUTES,
        "float16",
        "int32",
    )
    env = call.environment()
    for name, text in DEFINE.items():
        env[f"value {name}"] = compile_expression(text, scope)(env)
    right: dict[str, tuple[str, int]] = {}
    wrong: list[str] = []
    while len(right) < 200 or len(wrong) < 60:
        text = number(rng, 4)
        compiled = compile_expression(text, scope)
        try:
            value = exact(compiled.data, env)
        except ArithmeticError:
            wrong.append(text)
            continue
        assert compiled(env) == value, text
        right[f"a{len(right)}"] = (text, value)

    def plan(arguments: dict[str, str]) -> dict[str, Any]:
        step = Launch("probe", ("1", "1", "1"))
        return Plan(HYBRID_ATTENTION, (step,), PLAN.key, PLAN.constants, define=DEFINE, arguments=arguments).data

    chosen = dict(list(right.items())[:200])
    op = op_with(
        core, tmp_path / "right", plan({n: t for n, (t, _) in chosen.items()}), probe=[f"{n}:i64" for n in chosen]
    )
    recorder.arguments("probe_kernel", "l" * len(chosen) + "pp")
    op.prepare(inputs())
    op.launch(*addresses(op), 0x7000000, 0)
    ((_, fields),) = recorder.launches()
    for (text, value), got in zip(chosen.values(), fields["args"].split(","), strict=False):
        assert int(got) - (2**64 if int(got) >= 2**63 else 0) == value, text
    for number_, text in enumerate(wrong[:60]):
        op = op_with(core, tmp_path / f"wrong{number_}", plan({"a": text}), probe=["a:i64"])
        with pytest.raises(CoreError, match=r"divides by|beyond 64 bits"):
            op.prepare(inputs())


def names_of() -> list[str]:
    return [name for name in HYBRID.input_names() if name not in ABSENT]


def test_loops_branches_and_names(core: Core, recorder: Recorder, tmp_path: Path) -> None:
    plan = Plan(
        HYBRID_ATTENTION,
        (
            Loop("i", "0", "5", "2", (Let("n", "min(2, 5 - i)"), Branch("i == 2", (), (Launch("probe", ("n", "1", "1"), a="i"),)))),
            Let("n", "7"),
            Launch("probe", ("n", "H", "B"), a="n"),
            Launch("probe", ("n - 7", "H", "B"), a="n"),
        ),
        PLAN.key,
        PLAN.constants,
        arguments={"scale": "mix_epsilon if mix_epsilon > 1 else rsqrt(D)"},
    )  # fmt: skip
    op = op_with(core, tmp_path, plan.data, probe=["a:i32", "scale:f32"])
    recorder.arguments("probe_kernel", "ifpp")
    op.prepare(inputs())
    op.launch(*addresses(op), 0x7000000, 0)
    assert [(f["grid"], f["args"]) for _, f in recorder.launches()] == [
        ("2,1,1", "0,0.125,0,0"),
        ("1,1,1", "4,0.125,0,0"),
        ("7,6,2", "7,0.125,0,0"),
    ]


def test_workspace_covers_the_splits_of_fewer_rows_and_the_tokens_that_are_named(core: Core, tmp_path: Path) -> None:
    """Two rows of 3 tokens need more than the largest call, 2 rows of 150."""
    region = Region("part", "T", ("B * (64 // B) if T <= 8 else 1", "100 * T if T <= 8 else 1"))
    for measured, size in (((1,), 100), ((1, 8), 800)):
        plan = Plan(HYBRID_ATTENTION, (), PLAN.key, PLAN.constants, workspace=(region,), measured_tokens=measured)
        op = op_with(core, tmp_path / str(size), plan.data)
        assert op.workspace(inputs(B=3)) == 64 * size * 2


def test_no_plan_without_kernels(core: Core) -> None:
    """Shapes follow from the op alone; what a plan would check waits for one."""
    op = made(core, chunk_size=16)
    assert op.infer(inputs())
    with pytest.raises(CoreError, match="built without kernels"):
        op.workspace(inputs())


def test_plans_of_two_versions_do_not_mix(core: Core, tmp_path: Path) -> None:
    add(core, tmp_path / "a")
    add(core, tmp_path / "b", variant("sm_80"))
    other = copy.deepcopy(PLAN.data)
    other["arguments"]["G"] = 1
    with pytest.raises(CoreError, match="launch plan of HybridAttention is another one"):
        add(core, tmp_path / "c", plan=other)
    assert core.library.still_variant_count() == 2


def nested(depth: int) -> Any:
    return ["+", nested(depth - 1), 1] if depth else 1


def steps(depth: int) -> list[Any]:
    return [{"if": 1, "then": steps(depth - 1), "else": []}] if depth else []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": {"G": ["size", "Z"]}}, "the size Z is unknown"),
        ({"arguments": {"G": ["attribute", "Z"]}}, "the attribute Z is unknown"),
        ({"arguments": {"G": ["constant", "Z"]}}, "the constant Z is unknown"),
        ({"arguments": {"G": ["value", "Z"]}}, "the name Z is not defined"),
        ({"arguments": {"G": ["power", 1, 2]}}, "power takes 1 parts"),
        ({"arguments": {"G": ["power", 1]}}, "expected a string"),
        ({"arguments": {"G": ["+", 1]}}, r"\+ takes 2 parts, got 1"),
        ({"arguments": {"G": ["+"]}}, "lacks its parts"),
        ({"arguments": {"G": []}}, "lacks its parts"),
        ({"arguments": {"G": ["+", 1, ["text", "a"]]}}, r"\+ takes integers"),
        ({"arguments": {"G": ["<", ["text", "a"], ["text", "b"]]}}, "different types"),
        ({"arguments": {"G": ["==", ["text", "a"], 1]}}, "different types"),
        ({"arguments": {"G": ["if", 1, 2, ["text", "a"]]}}, "different types"),
        ({"arguments": {"G": ["text", "a"]}}, "of the wrong type"),
        ({"arguments": {"G": ["dim", "gate", 4]}}, "gate has no dimension 4"),
        ({"arguments": {"G": ["dim", "gate", -1]}}, "gate has no dimension -1"),
        ({"arguments": {"G": ["has", "Z"]}}, "the tensor Z is unknown"),
        ({"arguments": {"G": 2**70}}, "expected an integer"),
        ({"arguments": {"G": 1.5}}, "expected an integer"),
        ({"arguments": {"G": nested(30)}}, "larger than the library takes"),
        ({"arguments": {"G": {}}}, "expected an array"),
        ({"arguments": {f"a{i}": 1 for i in range(2000)}}, "2000 entries"),
        ({"key": {"dtype": ["constant", "segment_tiles"]}}, "constant segment_tiles is unknown"),
        ({"define": [["a", 1], ["a", 2]]}, "a is defined twice"),
        ({"define": [["a"]]}, "no pair"),
        ({"workspace": [{"name": "a", "element": 1, "shape": [], "when": 1}]}, "of the wrong type"),
        ({"workspace": [{"name": "a", "element": ["text", "T"], "shape": [1] * 9, "when": 1}]}, "too many dimensions"),
        ({"steps": steps(9)}, "nested deeper"),
        ({"steps": [{"launch": "score", "grid": [1, 1], "arguments": {}}]}, "needs three dimensions"),
        ({"steps": [{"if": 1, "then": []}]}, "else"),
        ({"steps": [{"loop": "i", "start": 0, "stop": 1, "step": 1, "body": []}, {"let": "j", "value": ["value", "i"]}]}, "i is not"),
        ({"steps": {}}, "expected an array"),
        ({"checks": [{"condition": 1, "message": [{"value": ["value", "Z"]}]}]}, "the name Z"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_damaged_plans_are_refused_when_they_are_read(
    change: dict[str, Any], message: str, core: Core, tmp_path: Path
) -> None:
    with pytest.raises(CoreError, match=message):
        add(core, tmp_path, plan={**PLAN.data, **change})
    assert core.library.still_variant_count() == 0


LOOP = {"loop": "i", "start": 0, "stop": 2**62, "step": 1, "body": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [LOOP]}, "more than 262144 steps"),
        ({"steps": [{**LOOP, "body": [{**LOOP, "loop": "j", "stop": 1000}]}]}, "more than 262144 steps"),
        ({"steps": [{**LOOP, "step": 0}]}, "a step of 0"),
        ({"steps": [{**LOOP, "step": -1}]}, "a step of -1"),
        ({"steps": [{**LOOP, "start": 2**63 - 2, "stop": 2**63 - 1, "step": 2**62}]}, None),
        ({"steps": [{"launch": "nothing", "grid": [1, 1, 1], "arguments": {}}]}, "has no kernel nothing"),
        ({"steps": [{"launch": "score", "grid": [1, 1, 1], "arguments": {"query": 1}}]}, "takes query as ptr"),
        ({"steps": [{"launch": "score", "grid": [-1, 1, 1], "arguments": {}}]}, "a grid of -1 x 1 x 1"),
        ({"steps": [{"launch": "score", "grid": [0, 1, -1], "arguments": {}}]}, "a grid of 0 x 1 x -1"),
        ({"steps": [{"launch": "score", "grid": [1, 65536, 1], "arguments": {}}]}, "a grid of 1 x 65536 x 1"),
        ({"arguments": {**PLAN.data["arguments"], "T": 2**40}}, "T=1099511627776 does not fit 32 bits"),
        ({"arguments": {}}, "takes .*, which the launch plan does not pass"),
        ({"aliases": [{"name": "score", "tensor": "nothing", "when": 1}]}, "alias of the unknown tensor nothing"),
        ({"workspace": [{"name": "a", "element": ["text", "float8"], "shape": [1], "when": 1}]}, "unknown type float8"),
        ({"workspace": [{"name": "a", "element": ["text", "int8"], "shape": [-1], "when": 1}]}, "a buffer of 1 times -1"),
        ({"workspace": [{"name": "a", "element": ["text", "int8"], "shape": [2**40] * 2, "when": 1}]}, "a buffer of"),
        ({"workspace": [{"name": "a", "element": ["text", "int8"], "shape": [2**62], "when": 1}] * 2}, "two of the buffer a"),
        ({"workspace": [{"name": n, "element": ["text", "int8"], "shape": [2**62], "when": 1} for n in "abc"]}, "more memory"),
        ({"define": [["a", ["dim", "window_factor", 0]]]}, "the call does not tell"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_plans_that_make_no_sense_for_a_call_are_errors(
    change: dict[str, Any], message: str | None, core: Core, tmp_path: Path
) -> None:
    plan = {**PLAN.data, **change}
    if "define" in change:
        plan |= {"arguments": {}, "workspace": [], "matrices": [], "steps": []}
    add(core, tmp_path, plan=plan)
    op = made(core)
    if message is None:
        op.prepare(inputs())
        return
    with pytest.raises(CoreError, match=message):
        op.prepare(inputs())


def test_a_variant_without_a_constant_is_refused(core: Core, tmp_path: Path) -> None:
    entry = {**variant(), "constants": {k: v for k, v in CONSTANTS.items() if k != "segment_tiles"}}
    add(core, tmp_path, entry)
    with pytest.raises(CoreError, match="has no constant segment_tiles"):
        made(core).prepare(inputs())
