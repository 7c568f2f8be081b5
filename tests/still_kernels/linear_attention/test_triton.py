"""The Triton kernels of still::LinearAttention against the loop over tokens in float64: what its cases do not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.still_kernels.interpreted import run_cases
from tests.still_kernels.linear_attention.inputs import BOUND
from tests.still_kernels.test_triton import NARROW

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.linear_attention.triton_cases")


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
    errors = run_cases(Path(__file__).with_name("triton_cases.py"), (), "controls")["controls"]
    assert errors.pop("right") <= BOUND and len(errors) == 11
    assert all(wrong > 50 * BOUND for wrong in errors.values()), errors


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
