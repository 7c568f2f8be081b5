"""The PyTorch reference as a runner, and as a function of arrays named as in the exported graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.cache import empty_states, state_table
from still_export.models import forward_with_state
from still_export.package.calls import Arrays
from still_export.runtime.base import Runner


class TorchModel(Runner):
    """A STILL model in PyTorch with the interface of its package.

    Args:
        manifest: The package's manifest.
        model: A STILL model of any family, in the package's type or another.
    """

    def __init__(self, manifest: dict[str, Any], model: Any, folder: Path = Path()) -> None:
        self.folder, self.manifest = folder, manifest
        self.model = model.eval()
        self.table = state_table(model.config, model.dtype)
        self.all_logits = bool(manifest["model"]["all_logits"])
        self._states: list[dict[str, Tensor]] = []

    def empty_feed(self, batch: int, capacity: int) -> Arrays:
        feed = _named("past", empty_states(self.model.config, batch, self.model.dtype, capacity=capacity))
        return {**feed, "past_length": np.zeros(batch, np.int64)}

    @torch.no_grad()
    def infer(self, feed: Arrays) -> Arrays:
        """Run one call from the states in `feed`. Returns `logits` float32, `present_<state>.<layer>` and `present_length`."""
        states = self._by_layer({s.name: feed[s.past] for s in self.table})
        logits, present = self._call(feed["input_ids"], feed["new_tokens"], feed["past_length"], states)
        length = feed["past_length"] + feed["new_tokens"]
        return {"logits": logits, **_named("present", present), "present_length": length}

    def _call(
        self, input_ids: np.ndarray, counts: np.ndarray, length: np.ndarray, states: list[dict[str, Tensor]]
    ) -> tuple[np.ndarray, list[dict[str, Tensor]]]:
        ids, new, past = (torch.from_numpy(np.ascontiguousarray(x, np.int64)) for x in (input_ids, counts, length))
        logits, present = forward_with_state(self.model, ids, new, past, states, keep=0 if self.all_logits else 1)
        return logits.float().numpy(), present

    def _by_layer(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, Tensor]]:
        layers: list[dict[str, Tensor]] = [{} for _ in range(self.model.config.num_hidden_layers)]
        for state in self.table:
            own = np.require(arrays[state.name], requirements=("C", "W"))
            layers[state.layer][state.name.rsplit(".", 1)[0]] = torch.from_numpy(own)
        return layers

    def _clear(self) -> None:
        self._states = []

    def _resize(self, tokens: int) -> None:
        self.check_capacity(tokens)
        self.room = self.ample(tokens, tokens // 8 if self.room else 0)
        roomy = empty_states(self.model.config, self.batch, self.model.dtype, capacity=self.room)
        for old, new in zip(self._states, roomy, strict=False):
            for name, tensor in old.items():
                new[name][tuple(slice(0, n) for n in tensor.shape)] = tensor
        self._states = roomy

    @torch.no_grad()
    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        sequences, tokens = input_ids.shape
        counts = np.full(sequences, tokens, np.int64) if new_tokens is None else np.asarray(new_tokens, np.int64)
        self.reserve(counts, first)
        ids, counts = self._among_all(input_ids, counts, first)
        logits, self._states = self._call(ids, counts, self.length, self._states)
        self.length = self.length + counts
        return logits[first : first + sequences]

    def _fill(self, sequence: int, arrays: Mapping[str, np.ndarray]) -> None:
        for i, layer in enumerate(self._states):
            for name, tensor in layer.items():
                layer[name] = tensor.clone()  # a returned tensor may be a view
                layer[name][sequence] = 0
                if (source := arrays.get(f"{name}.{i}")) is not None:
                    layer[name][sequence][tuple(slice(0, n) for n in source.shape[1:])] = torch.from_numpy(
                        source[0].copy()
                    )

    def state_arrays(self) -> dict[str, np.ndarray]:
        return {f"{name}.{i}": x.numpy().copy() for i, layer in enumerate(self._states) for name, x in layer.items()}

    def _write_states(self, arrays: dict[str, np.ndarray]) -> None:
        self._states = self._by_layer(arrays)


def _named(side: str, layers: list[dict[str, Tensor]]) -> Arrays:
    return {f"{side}_{name}.{i}": x.numpy() for i, layer in enumerate(layers) for name, x in layer.items()}
