"""Check searched codes (gptq) by the outputs of their linear layers, next to those of plain rounding, on the model's own activations.

Searched codes may lie further from the weights than rounding to nearest, within a limit for each block. They are chosen for the layer's
output: there they lose at most twice as much as plain rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from still_export.package.files import MODEL
from still_export.proof.chains import Chain, nothing
from still_export.proof.held_weights import Stored, plainly_rounded, searched_weights, slabs
from still_export.proof.layerwise import LayerwiseModel
from still_export.proof.verdict import Check, Verdict

if TYPE_CHECKING:
    from still_export.models.load import Source

TWICE = 2.0
"""Allowed multiple of plain rounding's error (root mean square over a text's outputs)."""
TOKENS = 256
"""Tokens of the text."""
SHOWN = 4


def check_outputs(folder: Path, manifest: Mapping[str, Any], source: Source, words: Sequence[int]) -> Verdict:
    """Compare the outputs of every linear layer with searched codes to those with plainly rounded ones.

    Args:
        words: Tokens of text; empty: random ones.
    """
    searched = searched_weights(folder / MODEL, manifest, source.weights)
    if not searched:
        return Verdict()
    count = min(TOKENS, manifest["capacity"]["capacity_tokens"] if manifest["capacity"]["bounded"] else TOKENS)
    text = np.array(words[:count], np.int64)
    if not text.size:
        text = np.random.default_rng(0).integers(0, manifest["model"]["vocab_size"], count)
    lost: dict[str, float] = {}

    def before(name: str, layer: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        lost[name] = max(lost.get(name, 0.0), _lost(searched[name], source.weights[name], inputs[0].flatten(0, -2)))

    def watch(model: Any) -> None:
        for name, module in model.named_modules():
            if f"{name}.weight" in searched and isinstance(module, nn.Linear):
                module.register_forward_pre_hook(partial(before, f"{name}.weight"))

    layers = LayerwiseModel({"model": {"all_logits": False}}, source, prepare=watch)
    feed = layers.empty_feed(1, len(text)) | {"input_ids": text[None], "new_tokens": np.array([len(text)])}
    layers.run([Chain.of(feed, nothing)])
    wrong = sorted((name for name in lost if not lost[name] <= TWICE), key=lambda name: -lost[name])
    findings = [f"{name} loses {lost[name]:.3g} times what plain rounding loses of its outputs" for name in wrong]
    what = "".join(findings[:1]) + (f"; {len(findings)} do" if len(findings) > 1 else "")
    name = f"outputs of {len(lost)} layers with searched codes lose at most {TWICE:g} times what plain rounding loses"
    worst = max(lost.values(), default=0.0)
    verdict = Verdict.of(
        [Check(name, not wrong, what, "".join(wrong[:1]), worst, TWICE, tuple(findings[1 : 1 + SHOWN]))] if lost else []
    )
    if left := [name for name in searched if name not in lost]:
        verdict.not_asked.append(
            f"outputs of {len(left)} weights with searched codes by themselves ({left[0]}): no linear layer of the model has them"
        )
    return verdict


def _lost(stored: Stored, weight: Any, inputs: Tensor) -> float:
    """Error of the codes divided by plain rounding's, root mean square over the outputs of `inputs` [T, K]."""
    found, least = 0.0, torch.finfo(torch.float32).tiny
    for rows, right in slabs(weight):
        assert stored.step is not None
        plain = plainly_rounded(right, stored.step(rows).shape[-1], stored.bits)
        found += float((inputs @ (stored.rows(rows) - right).T).square().sum())
        least += float((inputs @ (plain - right).T).square().sum())
    return float(np.sqrt(found / least)) if np.isfinite(found) else np.inf
