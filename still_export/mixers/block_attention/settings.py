"""Settings of layers of type "selected_blocks", and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from still_export.mixers.layers import SELECTED
from still_graphs.errors import ConfigError
from still_kernels.select_blocks.spec import SELECT_BLOCKS, fault_of, slots_of

COARSE = 4
"""Ratio of the coarse means' stride and length to the fine ones', as in InfLLM-V2; 1 for single keys (an exact softmax)."""


def means_of(block: int) -> dict[str, int]:
    """`mean_stride` and `mean_length` for blocks of `block` tokens, in MiniCPM-SALA's proportions; for single tokens the keys
    themselves."""
    return {"mean_stride": max(1, block // 4), "mean_length": max(1, block // 2)}


def checked_choice(settings: Mapping[str, int], source: str) -> dict[str, int]:
    """The attributes of SelectBlocks: `settings`, which were read from `source`, and defaults.

    Raises:
        ConfigError: The settings contradict each other.
    """
    choice = {a.name: int(a.default) for a in SELECT_BLOCKS.attributes} | dict(settings)
    coarse = 1 if choice["mean_length"] == 1 else COARSE
    choice |= {"lse_stride": coarse * choice["mean_stride"], "lse_length": coarse * choice["mean_length"]}
    if choice["block_size"] > 0:
        choice["block_slots"] = slots_of(choice["top_blocks"], choice["dense_length"], choice["block_size"])
    if fault := fault_of(choice):
        raise ConfigError(f"{source}: {fault}. Fix it.")
    return choice


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """Attributes of SelectBlocks, by default MiniCPM-SALA's.

    Args:
        reuse: For each layer, the layer that chooses its blocks: an earlier one or itself; None: itself.
    """

    block_size: int = 64
    mean_stride: int = 16
    mean_length: int = 32
    top_blocks: int = 96
    init_blocks: int = 1
    local_blocks: int = 32
    dense_length: int = 8192
    reuse: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.reuse is not None:
            object.__setattr__(self, "reuse", tuple(self.reuse))
        self.block_choice()

    def source_of(self, layer: int) -> int:
        """The layer that chooses the blocks of `layer`."""
        return layer if self.reuse is None else self.reuse[layer]

    def check_reuse(self, types: Sequence[str]) -> None:
        """Raise ConfigError unless every layer reads its own blocks, or those of an earlier one that chooses its own."""
        if self.reuse is None:
            return
        if len(self.reuse) != len(types):
            raise ConfigError(
                f"reuse has {len(self.reuse)} entries for {len(types)} layers: it was made for another model. "
                "Measure again: still-export linearize BASE --find-reuse -o DIR."
            )
        for layer, source in enumerate(self.reuse):
            what = f"reuse[{layer}]={source}"
            if not 0 <= source <= layer:
                raise ConfigError(f"{what}: layer {layer} can read the blocks of layers 0..{layer}; give one of them.")
            if source == layer:
                continue
            for place in (layer, source):
                if types[place] != SELECTED:
                    raise ConfigError(
                        f"{what}: layer {place} is {types[place]}, which has no blocks; give {layer}, or another layer."
                    )
            if (origin := self.reuse[source]) != source:
                raise ConfigError(f"{what}: layer {source} reads the blocks of layer {origin}; give {origin}.")

    def block_choice(self) -> dict[str, int]:
        """All attributes of the op."""
        own = {f.name: getattr(self, f.name) for f in fields(BlockSettings) if f.name != "reuse"}
        return checked_choice(own, "the choice of blocks")
