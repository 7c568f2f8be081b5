"""Finds layers that can read blocks chosen by an earlier layer, from the base's own attention. Nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.errors import ConfigError
from still_export.mixers.layers import FULL, SELECTED, Finder
from still_export.package.staging import write_whole

if TYPE_CHECKING:
    from torch import Tensor

MOST_LOST, MORE_LOST = 0.1, 0.02
"""Largest share of a layer's attention that its own blocks may miss (above, it stays softmax), and that another layer's may miss in
addition."""
MOST_SETS = 1024
"""Sets of choosing layers that the search keeps at a layer."""
QUERIES = 64
"""Tokens at the end of a row whose attention is measured."""


@dataclass(frozen=True)
class Reuse:
    """Source of blocks for each layer, with the measurements.

    layers: "full", "own", or the index of the earlier layer whose blocks it reads.
    lost: [layer][source], the share of the layer's attention outside the source's blocks.
    base: Digest of the base's weights.
    """

    layers: tuple[str | int, ...]
    lost: tuple[tuple[float, ...], ...]
    base: str

    @classmethod
    def of(cls, lost: Sequence[Sequence[float]], base: str) -> Reuse:
        """Fewest softmax layers, then fewest choosing layers, then least missed attention.

        A layer may read the blocks of any choosing layer before it, if these miss little more than its own. Of the sets of choosing layers
        that later layers may read, the cheapest `MOST_SETS` are followed; up to ten choosing layers have no more.
        """

        def near(layer: int, source: int) -> bool:
            return lost[layer][source] <= min(MOST_LOST, lost[layer][layer] + MORE_LOST)

        count = len(lost)
        last = [
            max((layer for layer in range(source + 1, count) if near(layer, source)), default=-1)
            for source in range(count)
        ]
        # By the set: (softmax layers, choosing layers, missed attention) so far, and the kinds of layers.
        best: dict[frozenset[int], tuple[tuple[int, int, float], tuple[str | int, ...]]] = {
            frozenset(): ((0, 0, 0.0), ())
        }
        for layer, row in enumerate(lost):
            after: dict[frozenset[int], tuple[tuple[int, int, float], tuple[str | int, ...]]] = {}
            for sources, ((full, own, missed), layers) in best.items():
                source = min((s for s in sources if near(layer, s)), key=row.__getitem__, default=None)
                kinds: list[tuple[tuple[int, int, float], str | int]] = []
                if source is not None:
                    kinds.append(((full, own, missed + row[source]), source))
                if row[layer] <= MOST_LOST:
                    kinds.append(((full, own + 1, missed + row[layer]), "own"))
                for cost, kind in kinds or [((full + 1, own, missed), "full")]:
                    kept = frozenset(s for s in (sources | {layer} if kind == "own" else sources) if last[s] > layer)
                    if kept not in after or cost < after[kept][0]:
                        after[kept] = cost, (*layers, kind)
            best = dict(sorted(after.items(), key=lambda found: found[1][0])[:MOST_SETS])
        _, layers = min(best.values(), key=lambda found: found[0])
        return cls(layers, tuple(map(tuple, lost)), base)

    def fields(self) -> dict[str, Any]:
        """`layer_types` and `reuse` of a STILL configuration."""
        types = tuple(FULL if kind == "full" else SELECTED for kind in self.layers)
        return {"layer_types": types, "reuse": tuple(x if isinstance(x, int) else i for i, x in enumerate(self.layers))}

    def lines(self) -> list[str]:
        """The source of each layer, in words."""
        reads = (kind if isinstance(kind, str) else f"the blocks of layer {kind}" for kind in self.layers)
        return [f"layer {i}: {what}" for i, what in enumerate(reads)]

    def write(self, path: Path) -> None:
        lost = [[round(x, 4) for x in row] for row in self.lost]
        content = {"layers": list(self.layers), "lost": lost, "base": self.base}
        write_whole(path, json.dumps(content) + "\n")

    @classmethod
    def read(cls, path: Path, layers: int) -> Reuse:
        """Read the file for a model with `layers` layers.

        Raises:
            ConfigError: The file is damaged, or belongs to a model with another number of layers.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = cls(tuple(content["layers"]), tuple(map(tuple, content["lost"])), str(content["base"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--reuse {path}: {error}. Give the reuse.json of linearize --find-reuse.") from error
        for layer, kind in enumerate(found.layers):
            if kind not in ("full", "own") and not (isinstance(kind, int) and not isinstance(kind, bool)):
                raise ConfigError(
                    f"{path}: layers[{layer}]={kind!r}; give full, own, or the number of an earlier layer."
                )
        if len(found.layers) != layers:
            raise ConfigError(
                f"{path} belongs to a model with {len(found.layers)} layers; this one has {layers}. "
                "Measure again: still-export linearize BASE --find-reuse -o DIR."
            )
        return found

    def check(self, path: str, base: str) -> None:
        """Raise ConfigError if it was measured on other weights."""
        if self.base != base:
            raise ConfigError(
                f"{path} was measured on other weights than this base has. Run linearize --find-reuse on it."
            )


def lost_attention(model: Any, attentions: Sequence[Any], ids: Tensor) -> list[list[float]]:
    """lost[layer][source]: share of the layer's attention, from the last tokens of ids [1, T], outside the source's blocks."""
    import torch

    from still_export.mixers.trainable import SOFTMAX, attention_mode
    from still_kernels.select_blocks.meaning import Inputs, naive_select_blocks

    masses: list[Tensor] = []
    chosen: list[Tensor] = []

    def look(module: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else arguments[0]
        query, key, _ = module.project_heads(hidden, kwargs.get("position_embeddings"))
        size, tokens, heads = module.choice["block_size"], key.shape[1], key.shape[2]
        new, past = (torch.full((1,), n, device=key.device) for n in (tokens, 0))
        sums = key.new_zeros(1, heads, -(-tokens // module.choice["mean_stride"]), key.shape[3], dtype=torch.float32)
        blocks, _ = naive_select_blocks(Inputs(query, key, new, past, **module.choice), sums)
        count = -(-tokens // size)
        last = blocks[0, -QUERIES:].long()  # [n, HK, slots]
        read = torch.zeros(*last.shape[:2], count + 1, dtype=torch.bool, device=key.device)
        chosen.append(read.scatter_(2, torch.where(last < 0, count, last), True)[..., :count])
        grouped = query[0, -QUERIES:].unflatten(1, (heads, -1)).float()  # [n, HK, G, D]
        logits = torch.einsum("nkgd,tkd->nkgt", grouped, key[0].float()) * key.shape[3] ** -0.5
        seen = (
            torch.arange(tokens, device=key.device)
            <= torch.arange(tokens - len(last), tokens, device=key.device)[:, None]
        )
        weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).mean(2)
        masses.append(torch.nn.functional.pad(weights, (0, count * size - tokens)).unflatten(2, (count, size)).sum(3))

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in attentions]
    try:
        with torch.no_grad(), attention_mode(attentions, SOFTMAX):
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return [[float((mass * ~read).sum(2).mean()) for read in chosen] for mass in masses]


def find(model: Any, attentions: Sequence[Any], ids: Tensor, base: str) -> Reuse:
    """Find the source of each layer in a model whose layers all choose blocks, with held-out ids [1, T]."""
    return Reuse.of(lost_attention(model, attentions, ids), base)


FINDERS = (
    Finder(
        "reuse",
        mixer="blocks",
        text="Only find which layers may read the blocks of earlier ones (mixer blocks), without training.",
        least_tokens=lambda recipe: int(recipe.dense_length) + QUERIES,
        short="below dense_length every block is read. Give a smaller --dense-length, or",
        find=find,
        read=Reuse.read,
    ),
)
