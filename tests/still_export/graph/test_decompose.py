"""What is not traced again before it is translated: no op more than behind torch's own decompositions, and the same values."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from still_export.graph import lower
from still_export.graph.lower import onnx_of


class Simple(nn.Module):
    """A sum of two types, casts (one changes nothing), views (sizes that inputs say, one that none says), the other ops that are known."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        heads = (0.5 - x).to(torch.float32).unflatten(-1, (2, 6)).square() * torch.tensor([2.0, 3, 4, 5, 6, 7])
        heads = heads.transpose(1, 2).contiguous().transpose(1, 2) @ torch.eye(6).roll(1, 0)
        heads = torch.where((heads > 1) & (heads < 3) | (heads > 5), -0.25, 3.0) + heads + torch.arange(6)
        joined = torch.cat([heads, heads], 1).flatten(-2).to(torch.float16)
        return joined.type_as(y), y.to(torch.float64)


class Scaled(Simple):
    """A difference with a factor, which ONNX has no op for."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.rsub(x, 2.0, alpha=3.0), y)


class Other(Simple):
    """A write into what was made."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 2
        made[:, 0] = 1
        return super().forward(made, y)


class Moved(Simple):
    """An op that torch composes of others, and that stands in no table."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.movedim(0, 1).movedim(1, 0), y)


def exported(model: nn.Module, traces: list[int], monkeypatch: pytest.MonkeyPatch) -> object:
    anew = torch.export.ExportedProgram.run_decompositions
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.export.ExportedProgram, "run_decompositions", lambda *a, **o: (traces.append(1), anew(*a, **o))[1]
        )
        rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens")
        given = (torch.randn(3, 5, 12), torch.randn(3, 7))
        program = torch.export.export(model, given, dynamic_shapes=({0: rows, 1: tokens}, {0: rows}), strict=False)
        return onnx_of(program, ["x", "y"], ["joined", "wide"], [], {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, more",
    [(Simple(), 0), (Scaled(), 1), (Other(), 1), (Moved(), 1)],
    ids=["simple", "scaled", "other", "moved"],
)
def test_the_graph_is_that_of_torch(model: nn.Module, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    import onnx_ir as ir
    import onnxruntime

    traces: list[int] = []
    ours = exported(model, traces, monkeypatch)
    assert len(traces) == more
    monkeypatch.setattr(lower, "decompose_simply", lambda program: None)
    monkeypatch.setattr(lower, "promote_simply", contextlib.nullcontext)
    theirs = exported(model, traces, monkeypatch)
    assert len(traces) == more + 1
    counts = [Counter(node.op_type for node in graph.graph) for graph in (ours, theirs)]  # type: ignore[attr-defined]
    assert not counts[0] - counts[1]
    x, y = torch.randn(2, 9, 12), torch.randn(2, 7)
    feed = {"x": x.numpy(), "y": y.numpy()}
    for graph in (ours, theirs):
        session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString())  # type: ignore[arg-type]
        for found, expected in zip(session.run(None, feed), model(x, y), strict=True):
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3)
