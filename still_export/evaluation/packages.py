"""A package as a model for evaluation, answered by the runner that users run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.evaluation.bench import BenchOptions, bench
from still_export.loading.runtimes import open_runner, runtime_of
from still_export.package.folder import Package
from still_export.runtime.base import Runner
from still_export.runtime.sampling import Sampling


class PackageModel:
    """A runner with the interface of a transformers model: logits of ids without padding, greedy continuations.

    A package gives the logits of each call's last token, unless it was exported with all of them: others are had token by token.
    """

    device = torch.device("cpu")
    """Device of ids and logits, wherever the package runs."""

    def __init__(self, runner: Runner) -> None:
        model = runner.manifest["model"]
        self.runner = runner
        self.config = SimpleNamespace(vocab_size=int(model["vocab_size"]))
        self._all_logits = bool(model["all_logits"])

    def to(self, device: Any) -> PackageModel:
        """Returns itself: a package runs where it was opened."""
        return self

    def __call__(self, ids: Tensor, use_cache: bool = False, logits_to_keep: int = 0) -> Any:
        """Logits of the last `logits_to_keep` tokens of ids [B, T], 0 = all: an object whose `logits` are float32 [B, n, V]."""
        most = self.runner.most_rows or len(ids)
        parts = [self._logits(part.numpy(), logits_to_keep or ids.shape[1]) for part in ids.split(most)]
        logits = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return SimpleNamespace(logits=torch.from_numpy(logits.astype(np.float32, copy=False)))

    def _logits(self, tokens: np.ndarray, kept: int) -> np.ndarray:
        """Logits [B, kept, V] of the last tokens of [B, T]."""
        rows, count = tokens.shape
        feeding = self.runner.feeding
        self.runner.start(rows, feeding.length(count))
        if self._all_logits:
            fed, places = feeding.fed(tokens)
            return self._fed(fed)[:, places[-kept:]]
        first = count - kept + 1
        found = np.empty((rows, kept, self.config.vocab_size), np.float32)  # gigabytes for long texts, so once
        found[:, 0] = self._fed(feeding.fed(tokens[:, :first])[0])[:, -1]
        for place in range(first, count):
            found[:, place - first + 1] = self.runner.step(tokens[:, place])
        return found

    def generate(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        do_sample: bool,
        eos_token_id: int,
        pad_token_id: int,
    ) -> Tensor:
        """Each prompt and its greedy continuation up to its end, padded: [B, T + max_new_tokens]."""
        new = torch.full((len(ids), max_new_tokens), pad_token_id, dtype=torch.int64)
        for row, (prompt, mask) in enumerate(zip(ids, attention_mask, strict=True)):
            self.runner.start()
            said = self.runner.generate(prompt[mask.bool()].tolist(), max_new_tokens, Sampling(), {eos_token_id})
            written = list(said)
            new[row, : len(written)] = torch.tensor(written, dtype=torch.int64)
        return torch.cat([ids, new], dim=1)

    def _fed(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of tokens [B, T], fed in pieces: all [B, T, V], or the last [B, 1, V]."""
        step = self.runner.prefill_tokens
        pieces = [self.runner.feed(tokens[:, start : start + step]) for start in range(0, tokens.shape[1], step)]
        return np.concatenate(pieces, axis=1) if self._all_logits else pieces[-1]


def open_model(package: Package, setting: BenchOptions) -> PackageModel:
    """A package with the runner of `run`.

    Raises:
        ConfigError: The runtime or the provider is not one of the package.
        RunError: It does not run here.
    """
    asked = runtime_of(package.manifest["target"], setting.runtime).name
    return PackageModel(open_runner(package.path, package.manifest, asked, setting.provider, threads=setting.threads))


def costs(package: Package, length: int, setting: BenchOptions) -> dict[str, float]:
    """Costs of a package at a context of `length` tokens: size and peak memory in MB, seconds of prefill, ms of a decode step."""
    (row,) = bench(package.path, replace(setting, lengths=(length,)))
    size = sum(entry["size_bytes"] for entry in package.manifest["files"].values())
    return {
        "size, MB": size / 1e6,
        "peak, MB": row.peak_mb,
        f"prefill {length}, s": row.prefill_s,
        f"decode {length}, ms": row.decode_ms,
    }
