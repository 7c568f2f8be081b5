"""Checks that hold for any correct package whatever rounding does: finite numbers, and logits that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from still_export.package.calls import Arrays
from still_export.proof.constants import USELESS
from still_export.proof.verdict import Check, Kind

LOGITS = "logits"
NUMBERS = 1 << 22
"""Logits that are compared at a time."""
SAME = "one logit for every token of the vocabulary"


@dataclass
class Logits:
    """Statistics of the logits of one call, [B, T] each.

    Args:
        spread: Standard deviation of the reference's logits.
        real: Not padding.
        constant: The runtime's logits are one number, the reference's are not.
    """

    spread: np.ndarray
    real: np.ndarray
    constant: np.ndarray

    @classmethod
    def of(cls, expected: np.ndarray, actual: np.ndarray) -> Logits:
        """From two outputs [B, T, V], a few rows at a time: temporaries are several times as large."""
        rows, vocabulary = expected.shape[:-1], expected.shape[-1]
        sides = [x.reshape(math.prod(rows), vocabulary) for x in (expected, actual)]
        size = max(1, NUMBERS // vocabulary)
        parts = [
            cls._of_rows(*(x[start : start + size] for x in sides)) for start in range(0, max(len(sides[0]), 1), size)
        ]
        whole = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(np.concatenate(each).reshape(rows) for each in whole))

    @classmethod
    def _of_rows(cls, expected: np.ndarray, actual: np.ndarray) -> Logits:
        wide = expected.astype(np.float32, copy=False)
        return cls(
            np.where(np.isfinite(wide), wide, 0).std(-1),
            np.any(expected != 0, axis=-1),
            is_constant(actual) & ~is_constant(expected),
        )


def is_constant(logits: np.ndarray) -> np.ndarray:
    """Whether all logits of a token are equal, [..] of [.., V]."""
    return np.asarray(logits.max(-1) == logits.min(-1))


@dataclass(frozen=True)
class Overflow:
    """The first place where a run is not finite or its logits are constant: a layer, or None for the logits."""

    layer: int | None
    what: str = "numbers that are not finite"

    @property
    def where(self) -> str:
        return "in the logits" if self.layer is None else f"in layer {self.layer}"

    @property
    def order(self) -> float:
        """Smaller in earlier layers."""
        return math.inf if self.layer is None else self.layer


@dataclass
class Findings:
    """The first non-finite output of a case, by layer, with its call and place."""

    infinite: tuple[float, str, int, tuple[int, ...]] | None = None
    logits: dict[int, Logits] = field(default_factory=dict)

    def see(self, call: int, errors: Arrays, expected: Arrays, actual: Arrays) -> None:
        """Check one call. `errors` come from `errors_of`: infinite where one side is not finite and both differ."""
        for name, found in errors.items():
            bad = np.isinf(found[0])
            if bad.any():
                place = tuple(int(i) for i in np.argwhere(bad)[0])
                entry = (layer_of(name), name, call + 1, place)
                self.infinite = min(filter(None, (self.infinite, entry)))
        if LOGITS in expected:
            self.logits[call] = Logits.of(expected[LOGITS], actual[LOGITS])


def layer_of(name: str) -> float:
    """Layer of a state "present_key.3"; infinity for outputs without a layer."""
    end = name.rpartition(".")[2]
    return int(end) if end.isdigit() else math.inf


def overflow_checks(
    overflows: Mapping[str, Overflow | None], right: Mapping[str, Overflow | None], dtype: str
) -> list[Check]:
    """Whether PyTorch's own runs in the package's type, and the reference in a wider type, stay finite; one check a case."""
    checks = []
    if (found := _first(right)) is not None:
        case, overflow = found
        what = f"PyTorch has {overflow.what} {overflow.where} in a wider type than the package's, so the model's weights are damaged"
        checks.append(Check("the reference is finite", False, what, f"{case}, {overflow.where}", kind=Kind.REFERENCE))
    if (found := _first(overflows)) is not None:
        case, overflow = found
        advice = "use bfloat16 or float32" if dtype == "float16" else "its weights are damaged, or beyond this type"
        what = f"this model overflows in {dtype} {overflow.where}; {advice}"
        checks.append(
            Check(
                f"the model can be computed in {dtype}", False, what, f"{case}, {overflow.where}", kind=Kind.REFERENCE
            )
        )
    return checks


def _first(overflows: Mapping[str, Overflow | None]) -> tuple[str, Overflow] | None:
    found = [(case, overflow) for case, overflow in overflows.items() if overflow is not None]
    return min(found, key=lambda each: each[1].order, default=None)


def overflow_of_logits(calls: Sequence[np.ndarray]) -> Overflow | None:
    """The fault in PyTorch's logits [B, T, V] of some calls (padding is 0); None: there is none."""
    if not all(np.isfinite(each).all() for each in calls):
        return Overflow(None)
    return Overflow(None, SAME) if any(is_constant(each).all() for each in calls if each.size) else None


def finite_check(findings: Mapping[str, Findings]) -> Check:
    found = [(f.infinite[0], case, *f.infinite[1:]) for case, f in findings.items() if f.infinite is not None]
    name = "every output is finite"
    if not found:
        return Check(name, True)
    layer, case, output, call, place = min(found)
    where = (
        f"{output}, " + (f"layer {layer:.0f}, " if layer < math.inf else "") + f"{case}, call {call}, row {list(place)}"
    )
    return Check(name, False, "not a finite number, or one where the reference has none", where)


def constant_check(findings: Mapping[str, Findings]) -> Check:
    name = "logits differ from token to token"
    for case, each in findings.items():
        for call, logits in each.logits.items():
            if logits.constant.any():
                place = [int(i) for i in np.argwhere(logits.constant)[0]]
                count = f"{int(logits.constant.sum())} of {logits.constant.size} rows"
                return Check(
                    name,
                    False,
                    f"{count} have one number for every token",
                    f"logits, {case}, call {call + 1}, row {place}",
                )
    return Check(name, True)


def rounding_check(rows: Sequence[tuple[np.ndarray, np.ndarray]], dtype: str) -> Check:
    """Whether the rounding errors of PyTorch's own run are small enough to judge by.

    Args:
        rows: Of each call the largest errors of its logits, and their spread, [N] each.
    """
    shares = np.concatenate([error / np.maximum(spread, 1e-30) for error, spread in rows] or [np.zeros(0)])
    share = float(np.median(shares[np.isfinite(shares)])) if np.isfinite(shares).any() else 0.0
    what = f"in {dtype} PyTorch's own logits are off by their spread, so they bound nothing"
    name, place = f"rounding in {dtype} leaves the logits", "logits, median token"
    return Check(name, share < USELESS, what, place, share, USELESS, kind=Kind.REFERENCE)
