"""How the next token is chosen; the error of every runner."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from still_export.package.refusals import RunError as RunError


@dataclasses.dataclass
class Sampling:
    """How the next token is chosen: temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1 or self.seed < 0:
            raise RunError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, seed={self.seed}: "
                "temperature, top_k and seed must not be negative, top_p lies in (0, 1]."
            )
        self.random = np.random.default_rng(self.seed)

    def choose(self, logits: np.ndarray) -> int:
        """Next token from logits [V]."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        below = logits[order].astype(np.float64) - float(logits[order[0]])
        with np.errstate(over="ignore"):  # the smallest temperatures: -inf, and probability 0
            probability = np.exp(below / self.temperature)
        probability /= probability.sum()
        # The smallest set whose mass reaches top_p: a token stays while the mass before it is below.
        kept = np.cumsum(probability) - probability < self.top_p
        order, probability = order[kept], probability[kept] / probability[kept].sum()
        return int(self.random.choice(order, p=probability))
