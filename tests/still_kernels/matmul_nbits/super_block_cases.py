"""Random K-quants as GGUF files have them, and what the gguf package makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from still_export.models.read.super_blocks import FORMS, tile_numbers, tile_words
from still_kernels.matmul_nbits.spec import SUPER


@dataclass(frozen=True)
class Case:
    """Sizes that all differ."""

    kind: str
    outputs: int = 40
    inputs: int = 768

    @property
    def bits(self) -> int:
        return FORMS[self.kind][0]

    @property
    def block(self) -> int:
        return FORMS[self.kind][1]

    @property
    def attributes(self) -> dict[str, int]:
        return {"bits": self.bits, "block_size": self.block, "super_block": SUPER}

    @property
    def sizes(self) -> dict[str, int]:
        words, numbers = (x.shape[1] for x in self.held())
        return {"I": self.inputs, "O": self.outputs, "IW": words, "IS": numbers}

    def rows(self) -> np.ndarray:
        """Bytes of a file: every byte, and numbers of both signs."""
        random, size = np.random.default_rng(self.outputs + self.inputs), FORMS[self.kind][2]
        raw = random.integers(0, 256, (self.outputs, self.inputs // SUPER, size), np.uint8)
        numbers = (random.random((*raw.shape[:2], 2)) - 0.4).astype("<f2") / 64
        if self.bits == 4:
            raw[..., :4] = numbers.view(np.uint8)
        else:
            raw[..., -2:] = numbers[..., :1].copy().view(np.uint8)
        return raw.reshape(self.outputs, -1)

    def small_rows(self) -> np.ndarray:
        """The same with weights as small as a model's."""
        raw = self.rows().reshape(self.outputs, self.inputs // SUPER, -1)
        number = np.array([2e-4 if self.bits == 4 else 5e-5], "<f2").view(np.uint8)
        if self.bits == 4:
            raw[..., :4] = np.tile(number, 2)
        else:
            raw[..., -2:] = number
        return raw.reshape(self.outputs, -1)

    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """`blocks` and `scales`."""
        return tile_words(self.rows(), self.bits), tile_numbers(self.rows(), self.bits)

    def weight(self) -> Tensor:
        """[O, I], float32."""
        return torch.from_numpy(dequantize(self.rows(), GGMLQuantizationType[self.kind]))

    def tokens(self, batch: int, count: int) -> Tensor:
        """[batch, count, I], one of whose numbers is far larger than the others."""
        x = torch.randn(batch, count, self.inputs, generator=torch.Generator().manual_seed(batch + 17 * count))
        x[..., 3] *= 30
        return x


CASES = {
    "Q4_K": Case("Q4_K"),
    "Q6_K": Case("Q6_K"),
    "Q4_K, one tile": Case("Q4_K", outputs=8, inputs=256),
    "Q6_K, one tile": Case("Q6_K", outputs=8, inputs=256),
    "Q4_K, several tasks": Case("Q4_K", outputs=1032, inputs=1280),
    "Q6_K, several tasks": Case("Q6_K", outputs=1032, inputs=1280),
}
