"""Random models of Mamba-in-Llama under their published names and in their published files: their formulas, one token after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention, silu, softplus

from tests.still_export.fla_models import States, turned
from tests.still_export.own_models import Draw, OwnModel, Shapes, mlp, mlp_shapes, rms, turns

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=24,
    intermediate_size=44,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1000.0,
    rope_scaling=None,
)
"""Of the base's config.json; sizes are small."""
BESIDE: dict[str, Any] = dict(
    d_model=24,
    rms_norm_eps=1e-6,
    vocab_size=None,
    d_inner=24,
    d_xb=12,
    intermediate_size=44,
    hidden_act="silu",
    n_layer=3,
)
"""Of mamba_config.json."""
FIRST: dict[str, Any] = dict(ssm_cfg={"expand": 1, "d_state": 3}, attn_layers=[1])
SECOND: dict[str, Any] = dict(ssm_cfg={"expand": 1, "ngroups": 4, "d_state": 6}, attn_layers=[1])
SIZES = {"mambainllama_mamba": FIRST, "mambainllama_mamba2": SECOND}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mambainllama_mamba", {}),
    "mamba, repeated behind": (
        "mambainllama_mamba",
        dict(ssm_cfg={"expand": 1, "d_state": 6, "d_conv": 3, "dt_rank": 5, "repeat_kv_before_conv": False}, d_xb=6),
    ),
    "mamba, alone": (
        "mambainllama_mamba",
        dict(attn_layers=[], d_inner=48, ssm_cfg={"d_state": 4, "conv_bias": False}),
    ),
    "mamba2": ("mambainllama_mamba2", {}),
    "mamba2, repeated first": (
        "mambainllama_mamba2",
        dict(ssm_cfg={"ngroups": 4, "d_state": 6, "repeat_kv_before_conv": True, "conv_bias": False}, attn_layers=[0]),
    ),
}
"""A family, and what is changed of its mamba_config.json."""


class InLlamaModel(OwnModel):
    """config.json of the base and mamba_config.json; `one`: all fields and the family's name in config.json, as Qwerky has them, and
    projections as one."""

    def __init__(self, family: str, draw: Draw, one: bool = False, **changes: Any) -> None:
        self.second, self.one = family.endswith("2"), one
        self.sizes, self.beside = LLAMA, {**BESIDE, **SIZES[family], **changes}  # type: ignore[misc]
        super().__init__("llama", draw)
        if one:
            self.config |= {**self.beside, "model_type": family, "vocab_size": self.config["vocab_size"]}

    def save_pretrained(self, folder: Path | str) -> None:
        own = self.tensors
        self.tensors = joined(own, self.second) if self.one else own
        super().save_pretrained(folder)
        self.tensors = own
        if not self.one:
            (Path(folder) / "mamba_config.json").write_text(json.dumps(self.beside, indent=4))

    def sized(self) -> tuple[int, int, int, int, int, bool]:
        """Channels inside, of x and B, of a state; taps; rank of the step; whether x and B are repeated first."""
        ssm = self.beside["ssm_cfg"]
        first = ssm.get("repeat_kv_before_conv", not self.second)
        return (
            self.beside["d_inner"],
            self.beside["d_xb"],
            ssm["d_state"],
            ssm.get("d_conv", 4),
            ssm.get("dt_rank", 2),
            first,
        )

    def layer_shapes(self, i: int) -> Shapes:
        width, inner = self.config["hidden_size"], self.beside["d_inner"]
        if i in self.beside["attn_layers"]:
            heads, keys = (self.config[f"num_{n}_heads"] * self.config["head_dim"] for n in ("attention", "key_value"))
            own: Shapes = {
                f"self_attn.{n}_proj.weight": (size, width) for n, size in (("q", heads), ("k", keys), ("v", keys))
            }
            return {**own, "self_attn.o_proj.weight": (width, heads), **mlp_shapes(self.config)}
        _, shared, dim, taps, rank, first = self.sized()
        steps = inner // dim if self.second else inner
        own = {"out_proj.weight": (width, inner), "D": (steps,)}
        mixed = (inner if first else shared) if not self.second else 3 * inner if first else inner + 2 * shared
        own["conv1d.weight"] = (mixed, 1, taps)
        if self.beside["ssm_cfg"].get("conv_bias", True):
            own["conv1d.bias"] = (mixed,)
        if self.second:
            own |= {"in_proj.weight": (2 * (inner + shared) + steps, width), "norm.weight": (inner,)}
            own |= {"dt_bias": (steps,), "A_log": (steps,)}
        else:
            own |= {f"{n}.weight": (shared, width) for n in ("in_proj_x", "B_proj")}
            own |= {f"{n}.weight": (inner, width) for n in ("in_proj_z", "C_proj")}
            own |= {"dt_proj_down.weight": (rank, width), "dt_proj.weight": (inner, rank), "dt_proj.bias": (inner,)}
            own["A_log"] = (inner, dim)
        return {**{f"mamba.{n}": shape for n, shape in own.items()}, **mlp_shapes(self.config)}

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x = self.config, self.embedded(ids)
        turn, groups = (
            turns(torch.arange(ids.shape[1]), c["head_dim"], c["rope_theta"]),
            c["num_attention_heads"] // c["num_key_value_heads"],
        )
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            h = rms(x, w["input_layernorm.weight"])
            if i in self.beside["attn_layers"]:
                q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, c["head_dim"])) for n in "qkv")
                q, k = turned(q, turn), turned(k, turn)
                heads = (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))
                out = scaled_dot_product_attention(*(y.transpose(1, 2) for y in heads), is_causal=True)
                x = x + out.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T
            else:
                own = {n.removeprefix("mamba."): t for n, t in w.items() if n.startswith("mamba.")}
                x = x + (self._mamba2 if self.second else self._mamba)(h, own, i, seen)
            x = x + mlp(x, w)
        return self.read_out(x)

    def _spread(self, y: Tensor) -> Tensor:
        """Groups of as many channels as a state has, repeated one after the other until all channels have one."""
        inner, shared, dim = self.sized()[:3]
        return torch.cat([part for part in y.split(dim, -1) for _ in range(inner // shared)], -1)

    def _convolved(self, y: Tensor, own: dict[str, Tensor], i: int, seen: States) -> Tensor:
        taps = own["conv1d.weight"]
        count = taps.shape[2]
        before = pad(y, (0, 0, count - 1, 0))
        seen.conv[i] = before[:, -(count - 1) :].transpose(1, 2)
        sums = sum(before[:, n : n + y.shape[1]] * taps[:, 0, n] for n in range(count))
        return silu(sums + own.get("conv1d.bias", 0.0))

    def _mamba(self, h: Tensor, own: dict[str, Tensor], i: int, seen: States) -> Tensor:
        inner, _, dim, _, _, first = self.sized()
        x, z, b, c = (h @ own[f"{n}.weight"].T for n in ("in_proj_x", "in_proj_z", "B_proj", "C_proj"))
        x = self._convolved(self._spread(x), own, i, seen) if first else self._spread(self._convolved(x, own, i, seen))
        step = softplus(h @ own["dt_proj_down.weight"].T @ own["dt_proj.weight"].T + 2 * own["dt_proj.bias"])
        # keys and queries of a group for every one of its channels
        b, c = (y.unflatten(-1, (-1, 1, dim)).expand(-1, -1, -1, dim, -1).flatten(2, 3) for y in (self._spread(b), c))
        kept = (-own["A_log"].exp() * step[..., None]).exp()
        state, outputs = h.new_zeros(len(h), inner, dim), []
        for t in range(h.shape[1]):
            state = kept[:, t] * state + (step * x)[:, t, :, None] * b[:, t]
            outputs.append((state * c[:, t]).sum(-1))
        seen.recurrent[i] = state[..., None]  # [B, H, D, 1]
        return ((torch.stack(outputs, 1) + own["D"] * x) * silu(z)) @ own["out_proj.weight"].T

    def _mamba2(self, h: Tensor, own: dict[str, Tensor], i: int, seen: States) -> Tensor:
        inner, shared, dim, _, _, first = self.sized()
        heads = inner // dim
        z, x, b, c, step = (h @ own["in_proj.weight"].T).split((inner, shared, shared, inner, heads), -1)
        if first:
            x, b = self._spread(x), self._spread(b)
        x, b, c = self._convolved(torch.cat((x, b, c), -1), own, i, seen).split((x.shape[-1], b.shape[-1], inner), -1)
        if not first:
            x, b = self._spread(x), self._spread(b)
        x, b, c = (y.unflatten(-1, (heads, dim)) for y in (x, b, c))
        step = softplus(step + own["dt_bias"])
        kept = (-own["A_log"].exp() * step).exp()
        state, outputs = h.new_zeros(len(h), heads, dim, dim), []
        for t in range(h.shape[1]):
            state = kept[:, t, :, None, None] * state + b[:, t, ..., None] * (step[..., None] * x)[:, t, :, None]
            outputs.append((c[:, t, ..., None] * state).sum(2))
        seen.recurrent[i] = state
        y = (torch.stack(outputs, 1) + own["D"][:, None] * x) * silu(z).unflatten(-1, (heads, dim))
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (y.flatten(2) * own["norm.weight"]) @ own["out_proj.weight"].T


def joined(tensors: dict[str, Tensor], second: bool) -> dict[str, Tensor]:
    """With projections that read the same as one tensor each, under the names of the published code for inference."""
    found = {name.replace("self_attn.o_proj", "mha.out_proj"): x for name, x in tensors.items()}
    parts = {"mha": [f"self_attn.{n}_proj" for n in "qkv"]}
    if not second:
        parts["mamba"] = [f"mamba.{n}" for n in ("in_proj_z", "in_proj_x", "B_proj", "C_proj", "dt_proj_down")]
    for name in list(found):
        for module, own in parts.items():
            if name.endswith(f".{own[0]}.weight"):
                start = name.removesuffix(f"{own[0]}.weight")
                found[f"{start}{module}.in_proj.weight"] = torch.cat([found.pop(f"{start}{n}.weight") for n in own])
    return found
