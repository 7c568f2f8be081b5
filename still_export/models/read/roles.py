"""The role of each weight, from the model's modules."""

from __future__ import annotations

from typing import Any

from still_export.errors import UnsupportedModelError
from still_export.mixers.roles import EMBEDDING, FEED_FORWARD, HEAD, NORM


def weight_roles(model: Any) -> dict[str, str]:
    """Roles of a STILL model's parameters by name; a tied embedding is an embedding.

    Raises:
        UnsupportedModelError: A module does not declare the role of a weight.
    """
    roles = {"lm_head.weight": HEAD, "model.embed_tokens.weight": EMBEDDING, **getattr(model, "weight_roles", {})}
    for i, layer in enumerate(model.model.layers):
        for part, module in layer.named_children():
            mixes = getattr(module, "weight_roles", None)
            roles |= {
                f"model.layers.{i}.{part}.{name}": FEED_FORWARD if mixes is None else mixes[name]
                for name, parameter in module.named_parameters()
                if parameter.dim() > 1 and (mixes is None or name in mixes)
            }
    found = {}
    for name, parameter in model.named_parameters():
        role = NORM if parameter.dim() < 2 else roles.get(name)
        if role is None:
            raise UnsupportedModelError(
                f"{name} has no role, so no policy says how it may be quantized. Export without --quantize."
            )
        found[name] = role
    return found
