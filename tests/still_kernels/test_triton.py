"""The Triton kernels of ops with states against their definitions: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.still_kernels.interpreted import run_cases
from tests.still_kernels.linear_attention.inputs import BOUND
from tests.tolerances import REFERENCE

pytest.importorskip("triton")
FAST = {
    "attention": ("decode", "some tokens", "prefill"),
    "block_attention": ("steps", "prompts"),
    "causal_conv": ("layer 0", "prompt", "with bias"),
    "linear_attention": ("head", "key", "decode", "pages"),
}
"""By op the cases of every run: all kernels, every way into the state."""
CASES: dict[str, dict[str, Any]] = {op: import_module(f"tests.still_kernels.{op}.triton_cases").CASES for op in FAST}
EVERY = {op: tuple(cases) for op, cases in CASES.items()}
REST = {op: tuple(name for name in EVERY[op] if name not in FAST[op]) for op in FAST}
NARROW = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Of outputs and states of linear attention with 16-bit activations: the roundings of outputs and of what products take."""
HARD = 3.0
"""Times as much where the inverse has large entries of either sign: keys that are nearly parallel (1.0e-2 seen in bfloat16), keys of
one dimension, and 10 dimensions, in which no keys are far apart, with beta up to 2 and nothing that decays."""


BESIDE = {"attention": {"key": 0.0, "value": 0.0}, "block_attention": {"blocks": 1e-3, "sums": 1e-5}, "causal_conv": {}}
"""Limits of errors beside the output's: caches are copied, so exact; clear choices are compared by the case, others are few."""


def check(op: str, name: str, errors: Any, dtype: torch.dtype) -> None:
    if op == "linear_attention":
        layer = CASES[op][name].layer
        hard = layer.cosine > 0 or layer.rule == "delta" or layer.dim == 1
        bound = layer.bound if dtype == torch.float32 else NARROW[dtype] * (HARD if hard else 1)
        assert errors["output"] <= bound and errors["state"] <= bound, errors
        return
    errors = {"output": errors} if op == "causal_conv" else errors
    limits = {"output": REFERENCE[dtype], **BESIDE[op]}
    assert {what: errors[what] for what, limit in limits.items() if not errors[what] <= limit} == {}


@dataclass(frozen=True)
class Run:
    """Cases of an op in one process; `shuffled`: programs run in any order."""

    op: str
    kind: str
    names: tuple[str, ...]
    mark: str = ""


RUNS = [
    *(Run(op, "float32", names) for op, names in FAST.items()),
    Run("attention", "float32", REST["attention"], "slow"),
    Run("attention", "shuffled", ("decode", "some tokens"), "slow"),
    Run("attention", "bfloat16", ("some tokens", "ragged splits"), "slow"),
    Run("attention", "float16", ("some tokens", "ragged splits"), "long"),  # kernels do not tell them apart
    Run("block_attention", "float32", REST["block_attention"], "slow"),
    Run("block_attention", "shuffled", ("steps", "large group"), "slow"),
    Run("block_attention", "bfloat16", FAST["block_attention"], "slow"),
    Run("block_attention", "float16", ("steps",), "slow"),
    *(
        Run("causal_conv", kind, EVERY["causal_conv"], "long")
        for kind in ("float32", "shuffled", "bfloat16", "float16")
    ),
    Run("linear_attention", "float32", REST["linear_attention"], "long"),
    Run("linear_attention", "shuffled", FAST["linear_attention"], "long"),
    Run("linear_attention", "bfloat16", ("head",)),
    *(Run("linear_attention", kind, EVERY["linear_attention"], "long") for kind in ("bfloat16", "float16")),
]


def cases() -> Iterator[Any]:
    """A run and one of its cases."""
    for run in RUNS:
        marks = [getattr(pytest.mark, run.mark)] if run.mark else []
        yield from (pytest.param(run, name, marks=marks, id=f"{run.op}-{run.kind}-{name}") for name in run.names)


@pytest.mark.parametrize("run, name", [*cases()])
def test_interpreter(run: Run, name: str) -> None:
    found = run_cases(Path(__file__).parent / run.op / "triton_cases.py", run.names, run.kind)
    dtype = torch.float32 if run.kind == "shuffled" else getattr(torch, run.kind)
    check(run.op, name, found[name], dtype)


@pytest.mark.parametrize(
    "op, kind, bound",
    [
        ("block_attention", "ties", None),
        pytest.param("attention", "beyond", None, marks=pytest.mark.slow),
        pytest.param("block_attention", "dispatch", None, marks=pytest.mark.slow),
        pytest.param("linear_attention", "resets", BOUND, marks=pytest.mark.slow),
        pytest.param("linear_attention", "large", NARROW[torch.float16], marks=pytest.mark.long),
        pytest.param("linear_attention", "garbage", None, marks=pytest.mark.long),
    ],
)
def test_what_a_case_asserts_itself(op: str, kind: str, bound: float | None) -> None:
    """Of equal scores the first is taken; a row that outgrows the state gets NaN for the tokens without a place; ops of PyTorch run the
    kernels; a decay that forgets all is no NaN; a state and products beyond float16; counts of garbage write nowhere."""
    found = run_cases(Path(__file__).parent / op / "triton_cases.py", (), kind)
    assert bound is None or max(found[kind].values()) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op, name", [(op, name) for op, names in EVERY.items() for name in names])
def test_gpu(op: str, name: str, dtype: torch.dtype) -> None:
    run_case = import_module(f"tests.still_kernels.{op}.triton_cases").run_case
    check(op, name, run_case(name, "cuda", dtype), dtype)
