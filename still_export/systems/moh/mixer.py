"""MoH's layers: each token uses the heads with its longest queries; built from still::Route and still::Attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from still_export.errors import ConfigError
from still_export.mixers.attention.mixer import AttentionMixer
from still_export.mixers.attention.module import SoftmaxAttention
from still_export.mixers.base import Mixer
from still_export.mixers.layers import head_size
from still_export.mixers.trainable import TrainableModule
from still_kernels.route.meaning import Inputs, margins, naive_route, route
from still_kernels.route.spec import ROUTE


class ChosenHeads(SoftmaxAttention):
    """Uses the first `shared` heads, and of the others the `routed` ones with the longest queries before RoPE; the rest output 0."""

    specs = (ROUTE,)

    def __init__(self, base: Any, head_dim: int, shared: int, routed: int) -> None:
        super().__init__(base, head_dim)
        self.shared, self.routed = shared, routed
        self.watch: Callable[[Tensor], Tensor | None] | None = None

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.heads(hidden)
        wide = torch.promote_types(query.dtype, torch.float32)
        lengths = query[:, :, self.shared :].detach().to(wide).square().sum(-1).sqrt()  # [B, T, other heads]
        lengths = lengths / (lengths - lengths.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt()
        router = torch.eye(lengths.shape[-1], dtype=wide, device=query.device)
        inputs = Inputs(lengths, router, k=self.routed)
        routing = route(inputs) if self.watch is None else naive_route(inputs, self.watch(margins(inputs)))
        taken = (routing[0][..., None] == torch.arange(lengths.shape[-1], device=query.device)).any(-2)
        output = self.attend(*self.turned(query, key, position_embeddings), value, past_key_values)
        first, others = output[:, :, : self.shared], output[:, :, self.shared :] * taken[..., None].to(output.dtype)
        return self.o_proj(torch.cat((first, others), dim=2).flatten(2))


class TrainableChosenHeads(TrainableModule, ChosenHeads):
    """ChosenHeads as teacher and student."""


def head_counts(config: Any) -> tuple[int, int]:
    """Returns (heads for every token, number of the others per token); by default a half and a quarter of all.

    Raises:
        ConfigError: None or all of the heads that are not shared are used.
    """
    heads = config.num_attention_heads
    counts = (getattr(config, name, None) for name in ("shared_heads", "routed_heads"))
    shared, routed = (usual if x is None else x for x, usual in zip(counts, (heads // 2, heads // 4), strict=True))
    if not (0 <= shared and 1 <= routed < heads - shared):
        raise ConfigError(
            f"shared_heads={shared} and routed_heads={routed} of {heads} heads; some of those that are not shared must be used, and not "
            "all. Fix them in config.json."
        )
    return shared, routed


class ChosenHeadsMixer(AttentionMixer):
    """Layers of type "chosen_heads"; a family's configuration may have `shared_heads` and `routed_heads`."""

    name = "chosen_heads"
    trained = TrainableChosenHeads

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> None:
        Mixer.paged(self, config, index, ranks, rank)  # refuses: an engine's own attention uses all heads

    def made(self, base: nn.Module, config: Any, index: int) -> ChosenHeads:
        return ChosenHeads(base, head_size(config), *head_counts(config))


MIXERS = (ChosenHeadsMixer(),)
