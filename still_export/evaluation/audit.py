"""Audits of a model: what must hold in its layers, as far as their mixers have something to say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from still_export.mixers.base import Audit
from still_export.mixers.registry import mixer_of


def audit(model: Any, tokenizer: Any, ids: Tensor) -> list[Audit]:
    """Audit the layers of `model` on one text, one audit a kind of layer.

    Args:
        model: A STILL model, float32 for tight bounds.
        ids: Token ids of the text, int64 [T].

    Raises:
        ConfigError: The text is too short.
    """
    mixers = {mixer.name: mixer for mixer in (mixer_of(model.config, i) for i in range(model.config.num_hidden_layers))}
    found = (mixer.audit(model, tokenizer, ids) for mixer in mixers.values())
    return [result for result in found if result is not None]


def passed(results: Sequence[Audit]) -> bool:
    """Whether everything that must hold holds."""
    return all(result.passed for result in results)


def values(results: Sequence[Audit]) -> dict[str, Any]:
    """All results, as JSON can hold them."""
    return {name: value for result in results for name, value in result.to_dict().items()} | {"passed": passed(results)}


def write_audit(results: Sequence[Audit], folder: Path, command: str) -> None:
    """Write audit.json."""
    from still_export.package.staging import staged_files

    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, **values(results)}
    with staged_files(folder) as work:
        (work / "audit.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
