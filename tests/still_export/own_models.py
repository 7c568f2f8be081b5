"""Random models of families whose published folders have code of their own: their formulas, one token after the other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers.modeling_outputs import CausalLMOutputWithPast

Draw = Callable[[str, tuple[int, ...]], Tensor]
Shapes = dict[str, tuple[int, ...]]
COMMON: dict[str, Any] = dict(vocab_size=61, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None)
LLAMA: dict[str, Any] = dict(hidden_size=24, intermediate_size=44, num_hidden_layers=3)
SAID: dict[str, Any] = dict(
    LLAMA, hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, rope_theta=1000.0, rope_scaling=None
)
"""What published configurations of Llama's kin say beside their heads."""


class States:
    """What a forward leaves behind, layer by layer, as transformers' caches tell it."""

    def __init__(self) -> None:
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor:
        return self.conv[layer]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor:
        return self.recurrent[layer]


class OwnModel:
    """A model whose parameters `draw`(name, shape) gives, under its published names."""

    sizes: ClassVar[dict[str, Any]]
    """Of its configuration, beside `COMMON`."""
    names: ClassVar[tuple[str, str, str, str]] = ("model.embed_tokens", "lm_head", "model.norm", "model.layers")
    """Of the embeddings, the head, the last norm and the layers."""

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        self.config = {"model_type": family, **COMMON, **self.sizes, **changes}
        self.tensors = {name: draw(name, shape) for name, shape in self.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, (embeddings, head, norm, layers) = self.config, self.names
        width, count = c.get("hidden_size") or c["d_model"], c.get("num_hidden_layers") or c["num_layers"]
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (c["vocab_size"], width) for name in (embeddings, head)}
        found[f"{norm}.weight"] = (width,)
        for i in range(count):
            found |= {f"{layers}.{i}.{name}": shape for name, shape in self.layer_shapes(i).items()}
        return found

    def layer_shapes(self, i: int) -> Shapes:
        raise NotImplementedError

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        raise NotImplementedError

    def layer(self, i: int) -> dict[str, Tensor]:
        """The tensors of layer `i` by the rest of their names."""
        prefix = f"{self.names[3]}.{i}."
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    def embedded(self, ids: Tensor) -> Tensor:
        return self.tensors[f"{self.names[0]}.weight"][ids]

    def read_out(self, x: Tensor) -> Tensor:
        """Logits of what the layers leave."""
        return rms(x, self.tensors[f"{self.names[2]}.weight"]) @ self.tensors[f"{self.names[1]}.weight"].T

    def save_pretrained(self, folder: Path | str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, Path(folder) / "model.safetensors", {"format": "pt"})

    def double(self) -> "OwnModel":
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


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Channels i and i + D / 2 as a complex number, turned."""
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def turns(places: Tensor, dim: int, theta: float) -> Tensor:
    """Rotations complex128 [T, 1, dim / 2] of tokens at `places` [T]."""
    angles = places[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def mlp_shapes(config: dict[str, Any], *norms: str) -> Shapes:
    """Of a layer's norms and its gated MLP, as Llama has them."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    names = norms or ("input_layernorm", "post_attention_layernorm")
    shapes: Shapes = {f"{name}.weight": (width,) for name in names}
    shapes |= {f"mlp.{x}_proj.weight": (inner, width) for x in ("gate", "up")}
    return {**shapes, "mlp.down_proj.weight": (width, inner)}


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """What Llama's MLP adds to x."""
    return gated(rms(x, w["post_attention_layernorm.weight"]), w)


def gated(h: Tensor, w: dict[str, Tensor]) -> Tensor:
    return (silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
