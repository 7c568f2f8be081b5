"""A prompt in parts, each prefilled by a process: as one process has it, outputs and states."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention import HybridAttentionConfig
from tests.still_kernels.interpreted import run_cases
from tests.tolerances import REFERENCE

pytest.importorskip("triton")
from still_kernels.hybrid_attention.parallel import AHEAD, REST, cut_prompt
from tests.still_kernels import parallel_cases

interpreted = functools.partial(run_cases, Path(parallel_cases.__file__))
COPIED = ("window_key", "window_value", "salient_key", "salient_value", "length")
LLAMA = HybridAttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128)


def wrong(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Those of what is copied, and those beyond the tolerance."""
    return {name: error for name, error in errors.items() if error > (0 if name in COPIED else REFERENCE[dtype])}


FAST = ("two",)
SLOW = ("without normalizer", "three, continued", "codes, group", "border off by one", "earlier salient tokens missing")


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_parts_are_the_whole(name: str) -> None:
    """Outputs by the definition in float64, the state by one process; and what is broken on purpose is seen."""
    found = wrong(interpreted(FAST if name in FAST else SLOW)[name], torch.float32)
    seen = {
        "without normalizer": {"output", "z_state"},
        "border off by one": {"output", "salient_key", "kv_state"},
        "earlier salient tokens missing": {"output", "salient_key"},
    }.get(name)
    assert found == {} if seen is None else seen <= set(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", parallel_cases.ON_GPU)
def test_parts_on_two_gpus(name: str) -> None:
    """Against the same kernels on one GPU, which select the same tokens."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    case = parallel_cases.ON_GPU[name]
    assert wrong(parallel_cases.worst(case, "cuda"), case.dtype) == {}


@pytest.mark.parametrize(("past", "rest"), [(0, REST), (70_001, REST), (0, 28_000)])
def test_parts_cost_the_same(past: int, rest: float) -> None:
    """Tokens counted one by one, within a chunk; parts behind the first wait for its sums."""
    cuts = cut_prompt(LLAMA, 262_144, 3, past, rest)
    ahead = min(AHEAD, rest * AHEAD / REST)
    waited = ahead * (cuts[1] - past)
    each = [rest, rest - ahead, rest - ahead]
    costs = [
        sum(x + p / 16 for p in range(begin, end))
        for x, (begin, end) in zip(each, itertools.pairwise(cuts), strict=True)
    ]
    costs = [costs[0], *(waited + x for x in costs[1:])]
    assert max(costs) - min(costs) < 3 * 64 * (rest + cuts[-1] / 16)
    assert cuts[0] == past and cuts[-1] == past + 262_144 and all(cut % 64 == 0 for cut in cuts[1:-1])


def test_too_few_tokens_for_the_parts_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least 2C=128"):
        cut_prompt(LLAMA, 300, 3)
