"""A package as a model to evaluate, computed by the runner of `still-export run`."""

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
    """A runner with the interface that `evaluate` uses of transformers models: logits of unpadded ids, greedy continuations.

    Packages return logits of each call's last token only, unless exported with all. Otherwise tokens are fed one by one.
    """

    device = torch.device("cpu")
    """Device of ids and logits; the package itself may run elsewhere."""

    def __init__(self, runner: Runner) -> None:
        model = runner.manifest["model"]
        self.runner = runner
        self.config = SimpleNamespace(vocab_size=int(model["vocab_size"]))
        self._all_logits = bool(model["all_logits"])

    def to(self, device: Any) -> PackageModel:
        """No effect: a package stays on its device."""
        return self

    def __call__(self, ids: Tensor, use_cache: bool = False, logits_to_keep: int = 0) -> Any:
        """Returns an object with `logits` float32 [B, n, V] of the last `logits_to_keep` tokens of ids [B, T]; 0: all."""
        most = self.runner.most_rows or len(ids)
        parts = [self._logits(part.numpy(), logits_to_keep or ids.shape[1]) for part in ids.split(most)]
        logits = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return SimpleNamespace(logits=torch.from_numpy(logits.astype(np.float32, copy=False)))

    def _logits(self, tokens: np.ndarray, last: int) -> np.ndarray:
        """Logits [B, last, V] of the last tokens of [B, T]."""
        rows, count = tokens.shape
        feeding = self.runner.feeding
        self.runner.start(rows, feeding.length(count))
        if self._all_logits:
            fed, places = feeding.fed(tokens)
            return self._fed(fed)[:, places[-last:]]
        first = count - last + 1
        found = np.empty(
            (rows, last, self.config.vocab_size), np.float32
        )  # gigabytes for long texts, so allocated once
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
        """Prompts with greedy continuations up to their end, padded: [B, T + max_new_tokens]."""
        new = torch.full((len(ids), max_new_tokens), pad_token_id, dtype=torch.int64)
        for row, (prompt, mask) in enumerate(zip(ids, attention_mask, strict=True)):
            self.runner.start()
            reply = self.runner.generate(prompt[mask.bool()].tolist(), max_new_tokens, Sampling(), {eos_token_id})
            written = list(reply)
            new[row, : len(written)] = torch.tensor(written, dtype=torch.int64)
        return torch.cat([ids, new], dim=1)

    def _fed(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of tokens [B, T] fed in pieces: [B, T, V] if the package returns all, else [B, 1, V]."""
        step = self.runner.prefill_tokens
        pieces = [self.runner.feed(tokens[:, start : start + step]) for start in range(0, tokens.shape[1], step)]
        return np.concatenate(pieces, axis=1) if self._all_logits else pieces[-1]


def open_model(package: Package, setting: BenchOptions) -> PackageModel:
    """Open a package in the runner of `still-export run`.

    Raises:
        ConfigError: The runtime or provider does not fit the package.
        RunError: The package does not run here.
    """
    runtime = runtime_of(package.manifest["target"], setting.runtime).name
    return PackageModel(open_runner(package.path, package.manifest, runtime, setting.provider, threads=setting.threads))


SPREAD, OTHERS = "decode, ± %", "used by other programs, %"
"""Costs that tell how good the others are: the spread of rounds, and how much of the processors others used meanwhile."""


def costs(package: Package, length: int, setting: BenchOptions) -> dict[str, float]:
    """Costs of a package at a context of `length` tokens: size and peak memory in MB, prefill in s, decode step in ms, with
    SPREAD and OTHERS."""
    (row,) = bench(package.path, replace(setting, lengths=(length,)))
    size = sum(entry["size_bytes"] for entry in package.manifest["files"].values())
    found = {
        "size, MB": size / 1e6,
        "peak, MB": row.peak_mb,
        f"prefill {length}, s": row.prefill_s,
        f"decode {length}, ms": row.decode_ms,
    }
    if row.decode_spread is not None:
        found[SPREAD] = 100 * row.decode_spread
    if row.others_cores is not None:
        found[OTHERS] = 100 * row.others_cores / row.cores
    return found
