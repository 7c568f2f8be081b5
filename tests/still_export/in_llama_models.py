"""Random models of Mamba-in-Llama under their published names and in their published files: their formulas, one token after the other."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention, silu, softplus

from tests.still_export.own_models import SAID, Draw, OwnModel, Shapes, States, mlp, mlp_shapes, rms, turned, turns

LLAMA: dict[str, Any] = dict(
    SAID,
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    mlp_bias=False,
    max_position_embeddings=4096,
)
"""Of the base's config.json; sizes are small."""
COMPANION_FILES: dict[str, Any] = dict(
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
        self.sizes, self.beside = LLAMA, {**COMPANION_FILES, **SIZES[family], **changes}  # type: ignore[misc]
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
            return {**self.softmax_shapes(), **mlp_shapes(self.config)}
        _, shared, dim, taps, rank, first = self.sized()
        steps = inner // dim if self.second else inner
        own: Shapes = {"out_proj.weight": (width, inner), "D": (steps,)}
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
        x = self.embedded(ids)
        for i in range(self.config["num_hidden_layers"]):
            w = self.layer(i)
            h = rms(x, w["input_layernorm.weight"])
            if i in self.beside["attn_layers"]:
                x = x + self.softmax(h, w)
            else:
                own = {n.removeprefix("mamba."): t for n, t in w.items() if n.startswith("mamba.")}
                x = x + (self._mamba2 if self.second else self._mamba)(h, own, i, seen)
            x = x + mlp(x, w)
        return self.read_out(x)

    def softmax_shapes(self) -> Shapes:
        width = self.config["hidden_size"]
        heads, keys = (self.config[f"num_{n}_heads"] * self.config["head_dim"] for n in ("attention", "key_value"))
        own: Shapes = {
            f"self_attn.{n}_proj.weight": (size, width) for n, size in (("q", heads), ("k", keys), ("v", keys))
        }
        return {**own, "self_attn.o_proj.weight": (width, heads)}

    def softmax(self, h: Tensor, w: dict[str, Tensor]) -> Tensor:
        """What a softmax layer's attention adds."""
        dim, groups = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        turn = turns(torch.arange(h.shape[1]), dim, self.config["rope_theta"])
        q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv")
        q, k = turned(q, turn), turned(k, turn)
        q, k, v = (y.transpose(1, 2) for y in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T

    def _spread(self, y: Tensor) -> Tensor:
        """Groups of as many channels as a state has, repeated one after the other until all channels have one."""
        inner, shared, dim = self.sized()[:3]
        return torch.cat([part for part in y.split(dim, -1) for _ in range(inner // shared)], -1)

    def _convolved(self, y: Tensor, own: dict[str, Tensor], i: int, seen: States) -> Tensor:
        taps = own["conv1d.weight"]
        count = taps.shape[2]
        before = pad(y, (0, 0, count - 1, 0))
        seen.conv[i] = before[:, -(count - 1) :].transpose(1, 2)
        sums = torch.stack([before[:, n : n + y.shape[1]] * taps[:, 0, n] for n in range(count)]).sum(0)
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


ZEBRA: dict[str, Any] = dict(
    {name: value for name, value in SAID.items() if name != "num_hidden_layers"},
    n_layer=3,
    mla_layers=[1],
    num_attention_heads=4,
    num_key_value_heads=2,
    kv_lora_rank=8,
    q_lora_rank=16,
    use_lora_layer_norm=False,
    use_full_kv_head=False,
    qk_rope_head_dim=8,
    v_head_dim=6,
    qk_nope_head_dim=5,
    qkv_rank_divisor=8,
    max_position_embeddings=4096,
    rope_scaling={"factor": 32.0, "original_max_position_embeddings": 64, "rope_type": "yarn"},
    attention_dropout=0.0,
    rope_type="yarn",
    d_model=24,
    ssm_cfg={"expand": 1, "ngroups": 4, "d_state": 6, "repeat_kv_before_conv": False},
    d_inner=24,
    d_xb=12,
)
"""Of hybrid_config.json."""
ZEBRA_FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "norms": dict(use_lora_layer_norm=True, num_key_value_heads=4, use_full_kv_head=True, rope_scaling=None),
    "plain queries": dict(q_lora_rank=None, ssm_cfg={"ngroups": 4, "d_state": 6, "repeat_kv_before_conv": True}),
}
"""What is changed of it."""


class ZebraModel(InLlamaModel):
    """Zebra-Llama: the same with attention to latents."""

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        self.second, self.one = True, False
        table = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        own = {"rope_scaling": {**table, "original_max_position_embeddings": 64}}  # the base's, which nothing reads
        self.beside = {**ZEBRA, **changes}
        self.sizes = {**LLAMA, **own}  # type: ignore[misc]
        self.beside["attn_layers"] = self.beside.pop("mla_layers")
        OwnModel.__init__(self, "llama", draw)

    def save_pretrained(self, folder: Path | str) -> None:
        OwnModel.save_pretrained(self, folder)
        said = {"mla_layers" if name == "attn_layers" else name: value for name, value in self.beside.items()}
        (Path(folder) / "hybrid_config.json").write_text(json.dumps(said, indent=4))

    def softmax_shapes(self) -> Shapes:
        b = self.beside
        width, rank, heads = b["hidden_size"], b["q_lora_rank"], b["num_attention_heads"]
        query = heads * (b["qk_nope_head_dim"] + b["qk_rope_head_dim"])
        own: Shapes = {"kv_a_proj_with_mqa.weight": (b["kv_lora_rank"] + b["qk_rope_head_dim"], width)}
        own["kv_b_proj.weight"] = (
            b["num_key_value_heads"] * (b["qk_nope_head_dim"] + b["v_head_dim"]),
            b["kv_lora_rank"],
        )
        own["out_proj.weight"] = (width, heads * b["v_head_dim"])
        own |= {"q_proj.weight": (query, width)} if rank is None else {}
        own |= {} if rank is None else {"q_a_proj.weight": (rank, width), "q_b_proj.weight": (query, rank)}
        if b["use_lora_layer_norm"]:
            own |= {"q_a_layernorm.weight": (rank,), "kv_a_layernorm.weight": (b["kv_lora_rank"],)}
        return {f"mla.{n}": shape for n, shape in own.items()}

    def softmax(self, h: Tensor, w: dict[str, Tensor]) -> Tensor:
        b = self.beside
        own = {n.removeprefix("mla.").removesuffix(".weight"): t for n, t in w.items() if n.startswith("mla.")}
        if "q_proj" in own:
            q = h @ own["q_proj"].T
        else:
            q = h @ own["q_a_proj"].T
            q = (rms(q, own["q_a_layernorm"]) if "q_a_layernorm" in own else q) @ own["q_b_proj"].T
        latent, shared = (h @ own["kv_a_proj_with_mqa"].T).split((b["kv_lora_rank"], b["qk_rope_head_dim"]), -1)
        latent = rms(latent, own["kv_a_layernorm"]) if "kv_a_layernorm" in own else latent
        groups = b["num_attention_heads"] // b["num_key_value_heads"]
        both = (latent @ own["kv_b_proj"].T).unflatten(-1, (b["num_key_value_heads"], -1)).repeat_interleave(groups, 2)
        k, v = both.split((b["qk_nope_head_dim"], b["v_head_dim"]), -1)
        plain, turned_q = q.unflatten(-1, (b["num_attention_heads"], -1)).split(
            (b["qk_nope_head_dim"], b["qk_rope_head_dim"]), -1
        )
        turned_q, shared = self._turned(turned_q), self._turned(shared[:, :, None])
        q, k = torch.cat((plain, turned_q), -1), torch.cat((k, shared.expand(-1, -1, k.shape[2], -1)), -1)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ own["out_proj"].T

    def _turned(self, x: Tensor) -> Tensor:
        """Neighbours turned together, by YaRN's frequencies where the file says so; the first of all pairs lie before the second."""
        b, dim = self.beside, x.shape[-1]
        rates = [b["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
        longer = 1.0
        if scaling := b["rope_scaling"]:

            def place(turns: float) -> float:
                tokens = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
                return dim * math.log(tokens) / (2 * math.log(b["rope_theta"]))

            low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), dim - 1)
            wide = high - low if high > low else 0.001
            shares = [min(max((i - low) / wide, 0.0), 1.0) for i in range(dim // 2)]
            rates = [r * (1 - share) + r / scaling["factor"] * share for r, share in zip(rates, shares, strict=True)]
            longer = 0.1 * math.log(scaling["factor"]) + 1
        angles = torch.arange(x.shape[1]).double()[:, None] * torch.tensor(rates, dtype=torch.float64)
        cos, sin = ((longer * y)[:, None].to(x.dtype) for y in (angles.cos(), angles.sin()))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


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
