"""Bit widths of a folder's weights, from `quantization_config` and the headers of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from still_export.folders.weights import TYPES, Head

_OF_CODES = (
    *(".qzeros", ".scales", ".g_idx", ".SCB"),
    *(f".weight_{name}" for name in ("scale", "scale_inv", "scale_2", "zero_point", "shape", "g_idx", "global_scale")),
    *(".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".output_scale"),
)
"""Suffixes of tensors that belong to codes."""


@dataclass(frozen=True)
class Codes:
    """Bit widths of a folder's weights, from `quantization_config`."""

    config: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.config.get("quant_method", ""))

    @property
    def bits(self) -> int:
        """Bits of most codes."""
        config = self.config
        found = config.get("bits") or config.get("w_bit") or (4 if config.get("load_in_4bit") else 0)
        for group in (config.get("config_groups") or {}).values():
            found = found or (group.get("weights") or {}).get("num_bits")
        algorithm = re.search(r"\d+", str(config.get("quant_algo", config.get("fmt", ""))))
        return int(found or (algorithm[0] if algorithm else 0))

    @property
    def group(self) -> str:
        """Number of inputs per scale, in words."""
        size = self.config.get("group_size") or self.config.get("q_group_size")
        for one in (self.config.get("config_groups") or {}).values():
            size = size or (one.get("weights") or {}).get("group_size")
        return f", groups of {size}" if isinstance(size, int) and size > 0 else ""

    def of(self, name: str, head: Head, names: Mapping[str, Head]) -> tuple[str, int]:
        """Returns (type of a tensor in words, number of weights in it)."""
        if head.dtype in ("I32", "U8", "I8") and self.method:
            zeros, scales = (names.get(f"{name.removesuffix('.qweight')}.{part}") for part in ("qzeros", "scales"))
            if (
                zeros and scales and zeros.numbers and scales.numbers
            ):  # GPTQ and AWQ: each layer has bits and groups of its own
                bits = zeros.numbers * 32 // scales.numbers
                count = head.numbers * 32 // bits
                return f"{bits} bits ({self.method}, groups of {count // scales.numbers})", count
            bits = self.bits or (8 if head.dtype == "I8" else 4)
            width = {"I32": 32, "U8": 8, "I8": 8}[head.dtype]
            return f"{bits} bits ({self.method}{self.group})", head.numbers * max(width // bits, 1)
        scaled = any(f"{name}{end}" in names for end in ("_scale", "_scale_inv"))
        kind = TYPES.get(head.dtype, head.dtype)
        return (f"{kind} ({self.method})" if scaled and self.method else kind), head.numbers

    def counted(self, heads: Mapping[str, Head]) -> Iterator[tuple[str, Head, str, int]]:
        """Name, header, type in words and number of weights of each tensor, without those that belong to codes."""
        for name, head in heads.items():
            if not name.endswith(_OF_CODES) and ".weight." not in name:
                yield name, head, *self.of(name, head, heads)
