"""Random models of families whose published folders have code of their own: their formulas, one token after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.still_export.fla_models import States

Draw = Callable[[str, tuple[int, ...]], Tensor]


class OwnModel:
    """A model whose parameters `draw`(name, shape) gives, under its published names."""

    sizes: ClassVar[dict[str, Any]]
    """Of its configuration."""

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        self.config = {"model_type": family, **self.sizes, **changes}
        self.tensors = {name: draw(name, shape) for name, shape in self.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        raise NotImplementedError

    def layer(self, i: int) -> dict[str, Tensor]:
        """The tensors of layer `i` by the rest of their names."""
        prefix = f"model.layers.{i}."
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    def save_pretrained(self, folder: Path | str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, Path(folder) / "model.safetensors", {"format": "pt"})

    def double(self) -> OwnModel:
        self.tensors = {name: x.double() for name, x in self.tensors.items()}
        return self

    def __call__(self, ids: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        seen = States()
        return CausalLMOutputWithPast(logits=self.logits(ids, seen), past_key_values=seen)  # type: ignore[arg-type]


def recurrence(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] of heads that forget exp(-slopes) at each token, and the last states."""
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1]), []
    kept = (-slopes.to(q.dtype)).exp()[:, None, None]
    for t in range(q.shape[1]):
        state = kept * state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def alibi(heads: int) -> list[float]:
    """The published slopes, by their recursion."""
    power = 1 << (heads.bit_length() - 1)
    start = 2 ** (-8 / power)
    own = [start * start**i for i in range(power)]
    return own if power == heads else own + alibi(2 * power)[0::2][: heads - power]


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


class TransNormerModel(OwnModel):
    """TransNormerLLM; three heads, so that the slopes are those of no power of two."""

    sizes: ClassVar[dict[str, Any]] = dict(
        vocab_size=61,
        decoder_embed_dim=24,
        decoder_layers=3,
        decoder_attention_heads=3,
        hidden_dim=24,
        glu_dim=44,
        norm_type="simplermsnorm",
        linear_act_fun="silu",
        linear_use_lrpe_list=[1, 0, 1],
        no_scale_embedding=False,
        bias=False,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
    )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        width, inner, wide, heads = c["decoder_embed_dim"], c["hidden_dim"], c["glu_dim"], c["decoder_attention_heads"]
        wide = width if wide == -1 else wide
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], width)}
        if not c["tie_word_embeddings"]:
            found["lm_head.weight"] = (c["vocab_size"], width)
        for i in range(c["decoder_layers"]):
            own: dict[str, tuple[int, ...]] = {
                "token_mixer.qkvu_proj.weight": (4 * inner, width),
                "token_mixer.out_proj.weight": (width, inner),
                "channel_mixer.l1.weight": (wide, width),
                "channel_mixer.l2.weight": (wide, width),
                "channel_mixer.l3.weight": (width, wide),
            }
            if c["bias"]:
                own |= {n.replace("weight", "bias"): shape[:1] for n, shape in own.items()}
            if c["linear_use_lrpe_list"][i]:
                own["token_mixer.lrpe.theta"] = (heads, 1, width // heads)
            found |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
        return found

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c = self.config
        heads, layers = c["decoder_attention_heads"], c["decoder_layers"]
        x = self.tensors["model.embed_tokens.weight"][ids]
        x = x if c["no_scale_embedding"] else x * c["decoder_embed_dim"] ** 0.5
        places = torch.arange(ids.shape[1], dtype=x.dtype)[:, None, None]
        for i in range(layers):
            w = self.layer(i)

            def linear(h: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
                return h @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1).to(h.dtype))

            q, k, v, u = linear(rms(x), "token_mixer.qkvu_proj").chunk(4, -1)
            q, k, v = (h.unflatten(-1, (heads, -1)) for h in (silu(q), silu(k), v))
            if "token_mixer.lrpe.theta" in w:
                angle = places * w["token_mixer.lrpe.theta"][:, 0].to(x.dtype)
                q, k = (torch.cat([h * angle.cos(), h * angle.sin()], -1) for h in (q, k))
            slopes = torch.tensor(alibi(heads), dtype=torch.float64) * (1 - i / (layers - 1) + 1e-5)
            output, seen.recurrent[i] = recurrence(q, k, v, slopes)
            x = x + linear(u * rms(output.flatten(2)), "token_mixer.out_proj")
            h = rms(x)
            x = x + linear(linear(h, "channel_mixer.l1") * linear(h, "channel_mixer.l2"), "channel_mixer.l3")
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        return rms(x) @ head.T


OWN: dict[str, type[OwnModel]] = {"transnormer": TransNormerModel}
"""By model_type."""
