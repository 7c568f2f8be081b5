"""The Triton kernels of still::LinearAttention against the loop over tokens in float64: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.still_kernels.interpreted import run_cases
from tests.still_kernels.linear_attention.inputs import BOUND

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.linear_attention.triton_cases")
SCRIPT = Path(__file__).with_name("triton_cases.py")
interpreted = functools.partial(run_cases, SCRIPT, kind="float32")
FAST = ("head", "key", "decode", "pages")
"""Cases of every run: all kernels, both kinds of decay."""
NARROW = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Of outputs and states with 16-bit activations: the roundings of outputs and of what products take."""
HARD = 3.0
"""Times as much where the inverse has large entries of either sign: keys that are nearly parallel (1.0e-2 seen in bfloat16), keys of
one dimension, and 10 dimensions, in which no keys are far apart, with beta up to 2 and nothing that decays."""


def check(name: str, errors: dict[str, float], dtype: torch.dtype) -> None:
    layer = triton_cases.CASES[name].layer
    hard = layer.cosine > 0 or layer.rule == "delta" or layer.dim == 1
    bound = layer.bound if dtype == torch.float32 else NARROW[dtype] * (HARD if hard else 1)
    assert errors["output"] <= bound and errors["state"] <= bound, errors


@pytest.mark.parametrize("name", FAST)
def test_interpreter(name: str) -> None:
    check(name, interpreted(FAST)[name], torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in triton_cases.CASES if n not in FAST])
def test_interpreter_rest(name: str) -> None:
    check(name, interpreted(tuple(n for n in triton_cases.CASES if n not in FAST))[name], torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", FAST)
def test_programs_may_run_in_any_order(name: str) -> None:
    check(name, interpreted(FAST, kind="shuffled")[name], torch.float32)


@pytest.mark.parametrize("name", ("head",))
def test_interpreter_in_bfloat16(name: str) -> None:
    check(name, interpreted(("head",), kind="bfloat16")[name], torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", list(NARROW), ids=str)
@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_interpreter_in_16_bits(name: str, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    check(name, interpreted(tuple(triton_cases.CASES), kind=kind)[name], dtype)


@pytest.mark.slow
def test_a_decay_that_forgets_all_is_no_nan() -> None:
    assert max(interpreted((), kind="resets")["resets"].values()) <= BOUND


@pytest.mark.long
def test_a_state_and_products_beyond_float16() -> None:
    assert max(interpreted((), kind="large")["large"].values()) <= NARROW[torch.float16]


@pytest.mark.gpu
def test_gpu_forgets_all_and_sees_each_fault() -> None:
    assert max(triton_cases.run_resets("cuda").values()) <= BOUND
    errors = triton_cases.run_controls("cuda")
    assert errors.pop("right") <= BOUND and all(wrong > 50 * BOUND for wrong in errors.values())
    assert max(triton_cases.run_large("cuda").values()) <= NARROW[torch.float16]
    triton_cases.run_garbage("cuda")


@pytest.mark.long
def test_each_fault_is_seen() -> None:
    """The negative controls of the design, through the kernels."""
    errors = interpreted((), kind="controls")["controls"]
    assert errors.pop("right") <= BOUND and len(errors) == 11
    assert all(wrong > 50 * BOUND for wrong in errors.values()), errors


@pytest.mark.long
def test_counts_of_garbage_write_nowhere() -> None:
    interpreted((), kind="garbage")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_gpu(name: str, dtype: torch.dtype) -> None:
    check(name, triton_cases.run_case(name, "cuda", dtype), dtype)


SIZES = {"B": 1, "T": 1, "HQ": 2, "G": 1, "D": 64, "HK": 2, "H": 4, "V": 32}


def test_the_decay_tells_the_variant() -> None:
    """A decay per head or per key; without one it need not be known."""
    op = kernels_of("LinearAttention")

    def variant(rule: str, **sizes: int) -> object:
        present = frozenset({"decay"} if sizes else ())
        attributes = {"update_rule": rule, "scale": 0.0}
        return op.variant_of(Call(SIZES | sizes, attributes, {}, "float16", "int64", present))

    shape = {"dtype": "float16", "head_dim": 64, "value_dim": 32}
    assert variant("gated", E=1) == op.variant(**shape, update_rule="gated")
    assert variant("gated", E=64) == op.variant(**shape, update_rule="gated", per_key=1)
    assert variant("linear") == op.variant(**shape, update_rule="linear")


def test_workspace_is_that_of_a_segment() -> None:
    """64K tokens of 32 heads of 128 need no more than 8K do."""
    op = kernels_of("LinearAttention")
    build = op.build(op.variant(), 90)

    def workspace(tokens: int) -> tuple[int, int]:
        sizes = {"B": 1, "T": tokens, "HQ": 32, "G": 1, "D": 128, "HK": 32, "H": 32, "V": 128, "E": 1, "W": 32}
        attributes = {"update_rule": "gated_delta", "scale": 0.0}
        call = Call(sizes, attributes, build.plan_constants, "bfloat16", present=frozenset({"decay", "beta"}))
        made = op.plan.evaluate(call)
        return sum(torch.Size(b.shape).numel() for b in made.workspace), len(made.steps)

    assert workspace(65536) == (workspace(8192)[0], 24) and workspace(8192)[1] == 3 and workspace(8) == (0, 1)
