"""ChosenHeads: the attention of a layer of which each token takes some heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.attention.module import SoftmaxAttention
from still_export.mixers.experts.op import route
from still_graphs.ops.route import ROUTE
from still_kernels.route.naive import Inputs, margins, naive_route


class ChosenHeads(SoftmaxAttention):
    """The first `shared` heads, and of the others the `routed` ones whose queries are longest before positions; the rest give nothing."""

    specs = (ROUTE,)

    def __init__(self, base: Any, head_dim: int, shared: int, routed: int) -> None:
        super().__init__(base, head_dim)
        self.shared, self.routed = shared, routed
        self.watch: Callable[[Tensor], Tensor | None] | None = None
        """Told of a call's choices, and may replace them, as a router's."""

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.heads(hidden)
        wide = torch.promote_types(query.dtype, torch.float32)
        lengths = query[:, :, self.shared :].detach().to(wide).square().sum(-1).sqrt()  # [B, T, other heads]
        lengths = lengths / (lengths - lengths.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt()
        router = torch.eye(lengths.shape[-1], dtype=wide, device=query.device)
        inputs = Inputs(lengths, router, k=self.routed)
        told = route(inputs) if self.watch is None else naive_route(inputs, self.watch(margins(inputs)))
        taken = (told[0][..., None] == torch.arange(lengths.shape[-1], device=query.device)).any(-2)
        output = self.attend(*self.turned(query, key, position_embeddings), value, past_key_values)
        first, others = output[:, :, : self.shared], output[:, :, self.shared :] * taken[..., None].to(output.dtype)
        return self.o_proj(torch.cat((first, others), dim=2).flatten(2))
