"""Packed 8-bit keys and values as the numbers that they encode. No torch."""

from __future__ import annotations

import numpy as np

from still_export.package.calls import Arrays


def scale_name(output: str) -> str:
    """Name of the scales of a state's output: "present_key_scale.3" of "present_key.3"."""
    state, _, layer = output.rpartition(".")
    return f"{state}_scale.{layer}"


def in_codes(outputs: Arrays) -> list[str]:
    """Names of the states that are words of four codes."""
    return [name for name in outputs if scale_name(name) in outputs]


def as_numbers(outputs: Arrays) -> Arrays:
    """`outputs` with 8-bit rows, words [.., D / 4], decoded to numbers [.., D] (`still_graphs.spec.CACHE`)."""
    numbers = {
        name: np.ascontiguousarray(outputs[name]).view(np.int8) * outputs[scale_name(name)][..., None]
        for name in in_codes(outputs)
    }
    return {**outputs, **numbers}
