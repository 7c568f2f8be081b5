"""What is asked of linearized layers whose formula stands in the tests: three layers, the one in the middle softmax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from still_export.mixers.cache import StillCache
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL
from still_export.models import attach_untrained
from tests.still_export.tiny import plain_model, random_ids
from tests.still_export.verbs import call

LINEAR = (0, 2)
"""The layers that are linearized."""


def types_of(kind: str) -> tuple[str, str, str]:
    return kind, FULL, kind


def attached(kind: str, family: str, dtype: torch.dtype, spread: float, **settings: Any) -> Any:
    """A random model; what a fresh layer has of its own is moved by `spread`, so that gates are neither closed nor alike."""
    model = attach_untrained(plain_model(family, dtype), StillConfig(layer_types=types_of(kind), **settings))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for index in LINEAR:
            layer = model.model.layers[index].self_attn
            for name in layer.fresh_names():
                parameter = layer.get_parameter(name)
                parameter += spread * torch.randn(parameter.shape, generator=random, dtype=torch.float64).to(dtype)
    return model


def seen_by_layers(model: Any) -> list[tuple[Any, dict[str, Any], Tensor]]:
    """Of each linearized layer the module, what it was given, and what went into its last projection, for 150 tokens without a cache."""
    found = []
    for index in LINEAR:
        module = model.model.layers[index].self_attn
        given: dict[str, Any] = {}
        module.register_forward_pre_hook(lambda m, a, k, given=given: given.update(k), with_kwargs=True)
        module.o_proj.register_forward_hook(lambda m, x, y, given=given: given.update(output=x[0]))
        found.append((module, given))
    with torch.no_grad():
        model(random_ids(2, 150), use_cache=False)
    return [(module, given, given["output"].detach()) for module, given in found]


def demand_pieces(model: Any, tolerance: float) -> None:
    """Calls of parts of a prompt, and padding behind one, change no logit."""
    ids = random_ids(2, 150)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = StillCache.empty(model.config)
        parts = [model(piece, past_key_values=cache).logits for piece in ids.split((70, 1, 1, 66, 12), dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=tolerance)
        mask = torch.ones_like(ids)
        mask[1, 90:] = 0
        cache = StillCache.empty(model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        following = random_ids(2, 7, seed=3)
        padded = model(following, past_key_values=cache).logits[1]
        alone = model(torch.cat((ids[1:, :90], following[1:]), 1), use_cache=False).logits[0, 90:]
        torch.testing.assert_close(padded, alone, rtol=0, atol=tolerance)


def demand_proven(folder: Path, package: Path, ops: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A linearized folder becomes a package of these ops that is proven."""
    assert call("export", folder, "--to", "onnx", "-o", package, "--quiet") == 0
    code = call("verify", package, "--lengths", "1,65,130", "--decode-steps", "8", "--quiet")
    assert code == 0, capsys.readouterr()
    assert set(json.loads((package / "manifest.json").read_text())["ops"]) == {*ops, "Attention"}
