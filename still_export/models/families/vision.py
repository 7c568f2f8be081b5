"""Qwen3.5's encoder of images as a function of tensors: patches of images of one size in, embeddings for the language model out.

Source: transformers, models/qwen3_5, whose modules hold the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.mixers.projections import rotate
from still_export.models.read.weights import Deferred, Weight, value_of

SEEN = ("qwen3_5", "qwen3_5_moe")
"""Model types whose encoder is covered."""
TOKENS = ("image_token_id", "video_token_id")
PREFIX = "model.visual."
PATCHES = "patch_embed.proj.weight"
TAPS = 2
"""Neighbouring rows of the position table that are interpolated, in each direction."""


@dataclass(frozen=True)
class Vision:
    """An encoder before its weights are read: configuration, weights by name, and its entry in the manifest."""

    config: Any
    weights: dict[str, Weight]
    settings: dict[str, Any]

    def encoder(self, tensors: Mapping[str, Tensor]) -> VisionEncoder:
        """The encoder around `tensors`, which have the names, shapes and types of `weights`."""
        with torch.device("meta"):
            made = VisionEncoder(self.config)
        made.visual.load_state_dict(tensors, strict=False, assign=True)
        # Its frequencies are no part of a checkpoint.
        made.visual.rotary_pos_emb = type(made.visual.rotary_pos_emb)(self.config)
        return made.eval()


def take_vision(config: Mapping[str, Any] | None, tensors: MutableMapping[str, Weight], source: str) -> Vision:
    """The encoder of `source`; its tensors are removed from `tensors`.

    Args:
        config: The published config.json.

    Raises:
        UnsupportedModelError: The model has no image encoder that is covered.
        ConfigError: Its configuration is not valid.
        CheckpointError: Names or shapes of tensors contradict the configuration.
    """
    kind = (config or {}).get("model_type")
    if (
        config is None
        or kind not in SEEN
        or not isinstance(config.get("vision_config"), dict)
        or None in map(config.get, TOKENS)
    ):
        raise UnsupportedModelError(
            f"--vision: {source} has no encoder of images that is covered; covered: {', '.join(SEEN)} as they are published. Export "
            "without it for the language model alone."
        )
    values = {"model_type": f"{kind}_vision", **config["vision_config"]}
    values["model_type"] = values["model_type"].removesuffix("_vision") + "_vision"
    try:
        read = AutoConfig.for_model(**values)
        with torch.device("meta"):
            expected = VisionEncoder(read).visual.state_dict()
    except Exception as error:  # of any type: huggingface_hub's, of shapes, of names
        raise ConfigError(f"vision_config in config.json of {source}: {' '.join(str(error).split())}") from error
    found = {name.removeprefix(PREFIX): tensors.pop(name) for name in [*tensors] if name.startswith(PREFIX)}
    if (patches := found.get(PATCHES)) is not None and patches.dim() > 2:
        flat = torch.Size((patches.shape[0], patches.shape[1:].numel()))
        found[PATCHES] = Deferred(flat, patches.dtype, partial(_flat, patches))
    for name in sorted(expected.keys() | found.keys()):
        here, there = (list(each[name].shape) if name in each else None for each in (found, expected))
        if here != there:
            raise CheckpointError(
                f"tensor {PREFIX}{name} has shape {here}, vision_config demands {there}. The files are incomplete or of another model. "
                "Fetch the model again."
            )
    sizes = {"merge": int(read.spatial_merge_size), "patch_values": int(expected[PATCHES].shape[1])}
    tokens = {name: int(config[name]) for name in TOKENS}
    return Vision(read, found, {**sizes, **tokens})


def _flat(weight: Weight) -> Tensor:
    return value_of(weight).flatten(1)


class VisionEncoder(nn.Module):
    """Embeds images of one size, or frames of a video."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.visual = AutoModel.from_config(config)
        patches = self.visual.patch_embed.proj
        self.visual.patch_embed.proj = nn.Linear(patches.weight[0].numel(), patches.out_channels)
        self.merge, self.side = int(config.spatial_merge_size), int(self.visual.num_grid_per_side)

    def forward(self, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """Embeddings [F, N / merge^2, out_hidden_size].

        Args:
            pixel_values: Patches in the order of transformers' processor, [F, N, patch_values]: row by row of `merge` x `merge` squares.
            grid: Rows and columns of patches, int64 [2], whose product is N.
        """
        visual = self.visual
        images, patches, _ = pixel_values.shape
        number = torch.arange(patches, device=grid.device)
        square = number // self.merge**2
        columns = grid[1] // self.merge
        row = square // columns * self.merge + number // self.merge % self.merge
        column = square % columns * self.merge + number % self.merge
        hidden = visual.patch_embed.proj(pixel_values.to(visual.patch_embed.proj.weight.dtype))
        hidden = hidden + self._positions(row, grid[0], column, grid[1]).to(hidden.dtype)
        angles = torch.stack((row, column), dim=-1)[..., None].float() * visual.rotary_pos_emb.inv_freq.float()
        angles = torch.cat((angles.flatten(1), angles.flatten(1)), dim=-1)[:, None]  # [N, 1, D]
        cos, sin = angles.cos(), angles.sin()
        for block in visual.blocks:
            hidden = hidden + self._attend(block.attn, block.norm1(hidden), cos, sin)
            hidden = hidden + block.mlp(block.norm2(hidden))
        merged: Tensor = visual.merger(hidden.flatten(0, 1))
        return merged.unflatten(0, (images, patches // self.merge**2)).float()

    def _positions(self, row: Tensor, rows: Tensor, column: Tensor, columns: Tensor) -> Tensor:
        """The square position table, interpolated to the image's size with aligned corners, [N, channels]."""
        (down, along), (low, high) = zip(*(self._taps(row, rows), self._taps(column, columns)), strict=True)
        places = down[:, :, None] * self.side + along[:, None]
        weights = low[:, :, None] * high[:, None]
        table: Tensor = self.visual.pos_embed(places.flatten(1))
        return (table * weights.flatten(1)[..., None]).sum(1)

    def _taps(self, place: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the two nearest rows of the table for each of N places, int64 [N, 2]; their weights)."""
        at = place.float() * (self.side - 1) / (size - 1).clamp_min(1)
        whole = at.floor()
        offsets = torch.arange(TAPS, device=place.device)
        taps = (whole.long()[:, None] + offsets).clamp_max(self.side - 1)
        return taps, 1 - (at[:, None] - whole[:, None] - offsets).abs()

    @staticmethod
    def _attend(module: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of every patch to all patches of its image, [F, N, channels]."""
        heads = module.qkv(hidden).unflatten(-1, (3, module.num_heads, -1))
        query, key, value = heads.unbind(2)  # [F, N, H, D]
        query, key = (rotate(x.float(), cos, sin).to(x.dtype) for x in (query, key))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return module.proj(mixed.transpose(1, 2).flatten(2))
