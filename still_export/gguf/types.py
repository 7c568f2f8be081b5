"""GGUF's tensor types: bits, and those that kernels read directly."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from still_export.errors import CheckpointError

BLOCK = 32
K_BYTES = 144
"""Bytes of a Q4_K block: two numbers, 12 bytes of factors, 128 of codes."""
BLOCKS = {
    "Q4_0": (4, False, True),
    "Q4_1": (4, True, True),
    "Q4_K": (4, True, False),
    "Q8_0": (8, False, True),
    "Q5_0": (8, False, True),
    "Q5_1": (8, True, False),
    "Q5_K": (8, True, False),
    "IQ4_NL": (8, False, True),
    "IQ4_XS": (8, False, False),
    "MXFP4": (8, False, False),
}
"""Types whose blocks of 32 are scale and offset of codes, with the bits that hold these, whether they have offsets, whether scales are half
precision. The blocks of 32 in one of 256 (Q4_K, Q5_K, IQ4_XS) have scales and offsets that are products of two numbers. Codes of Q5, and
of IQ4 and MXFP4, whose 16 numbers are not evenly spread, are whole numbers of 8 bits."""
FORMS = {"Q4_K": (4, 32, 144), "Q6_K": (6, 16, 210)}
"""K-quants that kernels read: bits, inputs of a block, bytes of 256 inputs."""


def bits_of(kind: str) -> int:
    """Bits of the codes of a GGUF type; 0: it has none."""
    digits = re.match(r"(?:I?Q|MXFP|NVFP|TQ)(\d)", kind)
    return int(digits[1]) if digits else 0


def undone(data: np.ndarray, kind: Any, origin: str) -> np.ndarray:
    """Values of the gguf package's type `kind`.

    Raises:
        CheckpointError: The type cannot be undone.
    """
    from gguf.quants import dequantize

    try:
        return np.asarray(dequantize(data, kind))
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{origin} is stored as {kind.name}, which the gguf package cannot undo. "
            "Use a file with Q4_0, Q4_1, Q5_*, Q8_0, K-quants, F16 or F32."
        ) from error
