"""The backward kernels of whole sequences against autograd: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from still_kernels.hybrid_attention.backward.gradients import covers_backward
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("backward_cases.py")
NARROW = 2e-2
"""Of gradients in bfloat16, relative to the largest: rounding of inputs to products and of the output, of which delta is made."""
BOUND = {"float32": 1e-5, "bfloat16": NARROW}

SOME = ("first promotion", "stage 1", "shared maps, group max", "forward and backward")
REST = (
    "one token",
    "within a chunk",
    "whole chunks",
    "past a chunk",
    "most of a chunk",
    "no factor",
    "group mean",
    "no logit of a row above -90",
    "none salient",
    "all salient",
    "released",
    "map softmax_pm",
    "map softmax",
    "map relu",
    "map elu_plus_one",
    "blocks of half a chunk",
    "forward and backward, group",
)
LARGE = ("heads of 64", "heads of 128")


@functools.cache
def errors(names: tuple[str, ...], kind: str) -> dict[str, dict[str, float]]:
    """Errors of cases on "DEVICE:DTYPE", from a process of its own."""
    if kind.startswith("cpu"):
        return run_cases(SCRIPT, names, kind)
    command = [sys.executable, "-W", "ignore", str(SCRIPT), kind, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def check(name: str, names: tuple[str, ...], kind: str) -> None:
    limit = BOUND[kind.split(":")[1]]
    found = errors(names, kind)[name]
    assert {what: error for what, error in found.items() if not error <= limit} == {}
    assert {"feature_q_weight", "feature_k_weight"} <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_interpreter(name: str) -> None:
    check(name, SOME, "cpu:float32")


@pytest.mark.long
@pytest.mark.parametrize("name", REST)
def test_interpreter_of_the_rest(name: str) -> None:
    check(name, REST, "cpu:float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", (*SOME, *REST, *LARGE))
def test_on_a_gpu(name: str, dtype: str) -> None:
    check(name, (*SOME, *REST, *LARGE), f"cuda:{dtype}")


def test_other_layers_are_differentiated_in_pytorch() -> None:
    config = HybridAttentionConfig(num_heads=2, num_kv_heads=1, head_dim=64)
    assert covers_backward(config, torch.float32) and covers_backward(config, torch.bfloat16)
    assert not covers_backward(config, torch.float16)
    for changes in ({"head_dim": 256}, {"overflow": "fold_oldest"}, {"feature_map": "identity"}, {"feature_dim": 256}):
        assert not covers_backward(dataclasses.replace(config, **changes), torch.bfloat16)
