"""How a model's layers of type "selected_blocks" choose, and what of it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from still_graphs.errors import ConfigError
from still_graphs.ops.select_blocks import SELECT_BLOCKS, fault_of, slots_of

COARSE = 4
"""Times the fine means' stride and length are those of the coarse ones, as InfLLM-V2 has them."""


def checked_choice(given: Mapping[str, int], source: str) -> dict[str, int]:
    """The attributes of SelectBlocks, of which `given` in `source` leaves out those that follow.

    Raises:
        ConfigError: They do not fit each other.
    """
    choice = {a.name: int(a.default) for a in SELECT_BLOCKS.attributes} | dict(given)
    choice |= {"lse_stride": COARSE * choice["mean_stride"], "lse_length": COARSE * choice["mean_length"]}
    if choice["block_size"] > 0:
        choice["block_slots"] = slots_of(choice["top_blocks"], choice["dense_length"], choice["block_size"])
    if fault := fault_of(choice):
        raise ConfigError(f"{source}: {fault}. Fix it.")
    return choice


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """Attributes of SelectBlocks, by default MiniCPM-SALA's.

    Raises:
        ConfigError: They do not fit each other.
    """

    block_size: int = 64
    mean_stride: int = 16
    mean_length: int = 32
    top_blocks: int = 96
    init_blocks: int = 1
    local_blocks: int = 32
    dense_length: int = 8192

    def __post_init__(self) -> None:
        self.block_choice()

    def block_choice(self) -> dict[str, int]:
        """All attributes of the op."""
        own = {f.name: getattr(self, f.name) for f in fields(BlockSettings)}
        return checked_choice(own, "the choice of blocks")
