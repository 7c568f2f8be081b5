"""The native CPU kernel of still::Attention, in ONNX Runtime, against the definition; the cases are those of the function body."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from tests.still_graphs import test_attention as body
from tests.still_graphs.node_model import WRONG_COUNTS, close, session, value
from tests.still_kernels.attention.inputs import SPLITS, Layer, Split, calls
from tests.tolerances import REFERENCE

LONG: list[Split] = [700, 1, [0, 40], 1, [1, 300], [9, 1], [1, 0]]
"""Several tiles and parts; blocks that begin anywhere; rows whose parts differ in number."""

CASES: list[tuple[Layer, list[Split]]] = [
    (Layer(), SPLITS),
    (Layer(heads=2), SPLITS),
    (Layer(heads=7, kv_heads=1, dim=5), SPLITS),
    (Layer(9, 3, 64, 1100), LONG),
    (Layer(4, 4, 20, 1100), LONG),
    (Layer(150, 1, 3, 600), [300, 1, [2, 130]]),
]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer, splits", CASES, ids=str)
def test_kernel_equals_definition(library: str, layer: Layer, splits: list[Split], in_place: bool) -> None:
    body.check(layer, splits, in_place=in_place, library=library, threads=2)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_instruction_sets(
    library: str,
    dtype: torch.dtype,
) -> None:
    body.check(Layer(6, 2, 24, 700), [300, 1, [1, 9], 280, 1], dtype, library=library)


def test_logits_far_apart(library: str) -> None:
    body.check(Layer(rows=700), [600, 1, 30], sharpness=30.0, library=library)


def test_what_is_not_filled_is_not_read(library: str) -> None:
    """Behind each row's own tokens: the kernel reads no more for a row because another one is longer."""
    layer = Layer(rows=700)
    runner = body.Runner(layer, torch.float32, 2, True, library=library)
    rubbish = torch.full((2, layer.kv_heads, layer.rows, layer.dim), torch.nan)
    runner.state = {name: value(rubbish.clone()) for name in ("key", "value")}
    for call in calls(layer, [[600, 3], 1, [0, 2], 1], torch.float32):
        close(runner(call.feeds)["output"], call.output, REFERENCE[torch.float32], "output")


def test_threads_change_no_bit(library: str) -> None:
    layer = Layer(9, 3, 16, 1100)
    runs = []
    for threads in (1, 2, 2):
        runner = body.Runner(layer, torch.float32, 2, True, library=library, threads=threads)
        runs.append([runner(call.feeds)["output"] for call in calls(layer, LONG, torch.float32)])
    for others in runs[1:]:
        assert all(torch.equal(first, other) for first, other in zip(runs[0], others, strict=True))


def test_the_kernel_takes_the_node(library: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run.onnx")
    session(body.node_model(Layer(), torch.float32, 2), save=path, library=library)
    assert [n.op_type for n in onnx.load(path).graph.node] == ["Attention"] * 2


@pytest.mark.parametrize("changes", WRONG_COUNTS, ids=str)
def test_wrong_counts_are_refused(library: str, changes: dict[str, Any]) -> None:
    layer = Layer(rows=12)
    runner = body.Runner(layer, torch.float32, 2, False, library=library)
    call = next(iter(calls(layer, [5], torch.float32)))
    with pytest.raises(Exception, match=r"Attention: sequence [01] (has past_length|grows to 65 tokens)"):
        runner(call.feeds | {name: torch.tensor(counts) for name, counts in changes.items()})
