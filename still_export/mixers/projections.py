"""Shared by attention modules: the replaced module's projections, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from still_export.errors import UnsupportedError
from still_export.mixers.roles import PROJECTION


class Carried:
    """Values passed to later layers besides hidden states, by index of the source layer. Opaque to tracers."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}


class ProjectedAttention(nn.Module):
    """The projections, and the norms of queries and keys, of a family's attention module.

    Args:
        base: The family's attention module; its submodules are reused, not copied.
    """

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION
    )
    """Roles of parameters that are matrices, by name (mixers/roles.py)."""
    fresh: ClassVar[tuple[str, ...]] = ()
    """Prefixes of parameters that a base model's attention lacks."""
    _carried: Carried
    cache: str | None = None
    """Type of cached keys and values; None: the activations'."""

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__()
        self.layer_idx: int = base.layer_idx
        self._carried = Carried()
        self.head_dim = head_dim
        self.use_rope = bool(getattr(base, "use_rope", True))  # SmolLM3 leaves some layers without positions
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        self.q_norm: nn.Module | None = getattr(base, "q_norm", None)  # Qwen3
        self.k_norm: nn.Module | None = getattr(base, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The call of a transformers decoder layer.

        `attention_mask` is not used: the cache knows the number of new tokens, and without a cache padding comes after all real tokens.
        """
        return self.mix(hidden_states, position_embeddings, past_key_values), None

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        """The layer's contribution to its hidden states [B, T, channels]; the arguments: see `forward`."""
        raise NotImplementedError

    def project_out(self, output: Tensor, hidden: Tensor) -> Tensor:
        """The layer's contribution, from its heads' output [B, T, H, D] and its input [B, T, channels]."""
        return self.o_proj(output.flatten(2))

    def project_heads(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, T, H, D] and key [B, T, HK, D] after norm and RoPE, value [B, T, HK, D], of hidden [B, T, channels]."""
        query, key, value = self.heads(hidden)
        return *self.turned(query, key, position_embeddings), value

    def heads(self, hidden: Tensor, projections: Sequence[nn.Module] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Like `qkv` before RoPE; `projections` replace the module's own."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        used = (self.q_proj, self.k_proj, self.v_proj) if projections is None else projections
        query, key, value = (proj(hidden).view(shape) for proj in used)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def turned(
        self, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Query and key [B, T, heads, D] after RoPE, if the layer has positions."""
        if not self.use_rope:
            return query, key
        if position_embeddings is None:
            raise UnsupportedError(
                f"{type(self).__name__} needs position_embeddings (cos, sin) from the model's rotary module."
            )
        cos, sin = (x[:, :, None] for x in position_embeddings)
        if query.shape[1] == 1 and not torch.compiler.is_compiling():
            # A single token costs launches: one for both instead of one each.
            query, key = rotate(torch.cat((query, key), dim=2), cos, sin).split((query.shape[2], key.shape[2]), dim=2)
            return query, key
        return rotate(query, cos, sin), rotate(key, cos, sin)

    def fresh_names(self) -> list[str]:
        """Names of parameters that a base model's attention lacks."""
        return [name for name, _ in self.named_parameters() if name.startswith(self.fresh)]

    def initial(self, name: str) -> Tensor:
        """Initial value of the parameter `name`, one of `fresh_names`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize, so that the untrained layer is usable."""
        for name in self.fresh_names():
            if not (parameter := self.get_parameter(name)).is_meta:
                init.copy_(parameter, self.initial(name))


UNIT_EPSILON = 1e-6
"""Added under the root of a query's or key's length, as in transformers."""


def unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPSILON)


def repeated(x: Tensor, groups: int, heads: int) -> Tensor:
    """Repeat every group of [B, T, groups * D] for the heads that share it: [B, T, heads * D]."""
    return x.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2).flatten(2)


def needs_gradients(x: Tensor) -> bool:
    """Whether operations on `x` need gradients."""
    return torch.is_grad_enabled() and x.requires_grad


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the first R channels of [B, T, h, D]; cos, sin [B or 1, T, 1, R] pair channel i with i + R/2."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotated(query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Query and key [B, T, heads, D] rotated by their positions, if the model has any."""
    if position_embeddings is None:
        return query, key
    cos, sin = (x[:, :, None] for x in position_embeddings)  # float32 in OLMo-Hybrid, whatever the model's type
    return rotate(query, cos, sin).to(query.dtype), rotate(key, cos, sin).to(key.dtype)
