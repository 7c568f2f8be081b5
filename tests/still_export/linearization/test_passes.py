"""Passes that are recorded and replayed give what passes give that are launched kernel by kernel; gradients are summed over processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from still_export.linearization import trainer
from still_export.linearization.linearize import linearize
from still_export.linearization.passes import Passes, ReplayedPasses, passes_of
from tests.still_export.training import make_base, make_text, small_recipe

LAYERS: dict[str, dict[str, Any]] = {
    "still": {},
    "gdn": {"mixer": "gdn"},
    "gla": {"mixer": "gla"},
    "liger-gla": {"mixer": "liger-gla", "transfer_steps": 0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lengths of rows, two passes a step: losses of every step, and what is trained."""
    sizes = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    base, text = make_base(tmp_path / "base", **sizes), make_text(tmp_path / "text.txt", words=40000)
    still = {"chunk_size": 64, "salient_per_chunk": 8, "selection_weight": 1.0, "learn_window_factors": True}
    changes: dict[str, Any] = {
        **(still if name == "still" else {"chunk_size": 64, "salient_per_chunk": 4}),
        **LAYERS[name],
    }
    recipe = small_recipe(
        base, text, sequence_length=1024, row_lengths=(512, 1024), micro_batch_size=2, capacity_tokens=1024,
        loss="kl", transfer_steps=6, finetune_steps=8, device="auto", validate_every=100, checkpoint_every=100,
    )  # fmt: skip
    recipe = type(recipe)(**{**vars(recipe), **changes})
    recorded: list[bool] = []
    record = ReplayedPasses._record

    def seen(self: ReplayedPasses, *given: Any) -> Any:
        found = record(self, *given)
        recorded.append(found is not None)
        return found

    monkeypatch.setattr(ReplayedPasses, "_record", seen)
    replayed = linearize(recipe, tmp_path / "replayed")
    monkeypatch.setattr(
        trainer, "passes_of", lambda accelerator, module, optimizer, *_: Passes(accelerator, module, optimizer)
    )
    launched = linearize(recipe, tmp_path / "launched")
    assert recorded == [True] * (2 * len(launched.stages))
    for one, other in zip(replayed.stages, launched.stages, strict=True):
        torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-6)
    assert replayed.bits_per_byte == pytest.approx(launched.bits_per_byte, rel=1e-4)


class Far(nn.Module):
    """Two parameters, of which rows of one token use the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        loss = (ids * weights).sum() * self.near
        return (loss if ids.shape[1] == 1 else loss * self.far), loss.detach()[None]


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_without_a_gradient_for_all(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped by DDP, as accelerate does it where there are several processes: here one, and a second one of the same gradients."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        module = DistributedDataParallel(Far())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        accelerator: Any = SimpleNamespace(
            device=torch.device("cpu"), num_processes=processes, autocast=contextlib.nullcontext,
            unwrap_model=lambda wrapped: wrapped.module, backward=lambda loss: loss.backward(),
        )  # fmt: skip
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(processes))
        passes = passes_of(accelerator, module, optimizer, kinds=2, checkpointing=False)
        for tokens, far in ((1, 0.0), (2, 6.0), (1, 0.0)):
            passes.begin()
            for last in (False, True):
                passes.run(torch.full((1, tokens), 3.0), torch.ones(1, tokens), 0.5, last)
            passes.end()
            assert [float(p.grad) for p in module.parameters()] == [3.0 * tokens, far]
    finally:
        torch.distributed.destroy_process_group()
