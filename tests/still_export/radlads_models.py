"""Random models of RADLADS (RWKV-6 and RWKV-7 in a Qwen) under their published names: their formulas, one token after the other."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import group_norm, normalize, pad, scaled_dot_product_attention

from tests.still_export.own_models import SAID, Draw, OwnModel, Shapes, States, mlp, mlp_shapes, rms, turned, turns

QWEN: dict[str, Any] = dict(
    SAID,
    num_attention_heads=3,
    num_key_value_heads=1,
    attention_bias=True,
    attention_dropout=0.0,
    initializer_range=0.02,
    max_position_embeddings=32768,
    max_window_layers=28,
    sliding_window=None,
    use_cache=True,
    use_sliding_window=False,
)
"""Of config.json of published folders; sizes are small."""
RANKS: dict[str, Any] = dict(lora_rank_decay=5, lora_rank_iclr=7, lora_rank_value_residual_mix=3, lora_rank_gate=6)
SIX: dict[str, Any] = dict(attention_output_bias=False, lora_rank_tokenshift=4, lora_rank_decay=5)
FIRST_SEVEN: dict[str, Any] = dict(RANKS, attention_output_bias=False)
SEVEN: dict[str, Any] = dict(
    FIRST_SEVEN,
    use_rope=True,
    num_attention_layers=0,
    gate_rank_type=2,
    balance_state=False,
    groupnorm_att=True,
)
THREE: dict[str, Any] = dict(
    RANKS,
    attention_bias=False,
    use_rope=True,
    num_attention_layers=1,
    gate_rank_type=2,
    balance_state=True,
    groupnorm_att=False,
    use_tokenshift=False,
)
SIZES = {"rwkv6qwen2": SIX, "rwkv7qwen2": SEVEN, "rwkv7qwen3": THREE}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "six": ("rwkv6qwen2", {}),
    "six, all said": (
        "rwkv6qwen2",
        dict(use_tokenshift=False, gate_rank_type=2, lora_rank_gate=6, groupnorm_att=True, use_rope=True),
    ),
    "six, no gate": ("rwkv6qwen2", dict(gate_rank_type=0, balance_state=False, attention_output_bias=True)),
    "seven": ("rwkv7qwen2", {}),
    "seven, the first": ("rwkv7qwen2", dict.fromkeys(SEVEN.keys() - FIRST_SEVEN.keys())),
    "seven, balanced": ("rwkv7qwen2", dict(balance_state=True, groupnorm_att=False, use_rope=False, gate_rank_type=1)),
    "seven, softmax": ("rwkv7qwen2", dict(num_attention_layers=1, balance_state=True)),
    "three": ("rwkv7qwen3", {}),
    "three, striped": (
        "rwkv7qwen3",
        dict(num_hidden_layers=5, num_attention_layers=4, attention_striping=2, last_striping_layer=2),
    ),
    "three, wide heads": (
        "rwkv7qwen3",
        dict(
            head_dim=10,
            num_attention_layers=0,
            gate_rank_type=0,
            balance_state=False,
            use_rope=False,
            attention_bias=True,
        ),
    ),
}
"""By name, model_type and what config.json says otherwise; None: it does not say that."""


class RadladsModel(OwnModel):
    """One of them; `sizes` are those of its model_type."""

    sizes: ClassVar[dict[str, Any]] = QWEN

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        given = {**SIZES[family], **changes}
        self.first = "balance_state" in changes and changes["balance_state"] is None
        self.seven = family != "rwkv6qwen2"
        super().__init__(family, draw, **given)
        self.config = {name: value for name, value in self.config.items() if name not in given or value is not None}
        for name in self.tensors:
            if name.endswith(("w0", "time_decay")):
                self.tensors[name] *= 8  # decays from almost nothing to almost all

    def said(self, name: str, otherwise: Any) -> Any:
        value = self.config.get(name)
        return otherwise if value is None else value

    @property
    def form(self) -> dict[str, Any]:
        """What the model's code does by its configuration."""
        qwen2 = self.config["model_type"] == "rwkv7qwen2"
        return {
            "gate": self.said("gate_rank_type", 2 if self.seven else 1),
            "norm": self.said("groupnorm_att", qwen2),
            "balanced": self.said("balance_state", not self.first),
            "rope": self.said("use_rope", False),
            "shift": self.first or (not self.seven and self.said("use_tokenshift", True)),
            "dim": self.said("head_dim", self.config["hidden_size"] // self.config["num_attention_heads"]),
        }

    def softmax(self, i: int) -> bool:
        c, layers = self.config, self.config["num_hidden_layers"]
        if i < layers - self.said("num_attention_layers", 0):
            return False
        last = c.get("last_striping_layer", 99999)
        return i > min(layers, last) or (min(layers - 1, last) - i) % c.get("attention_striping", 1) == 0

    def layer_shapes(self, i: int) -> Shapes:
        c, form, width = self.config, self.form, self.config["hidden_size"]
        heads, keys = (c[f"num_{n}_heads"] * form["dim"] for n in ("attention", "key_value"))
        qwen3 = c["model_type"] == "rwkv7qwen3"
        own: Shapes = {f"{n}_proj.weight": (size, width) for n, size in (("q", heads), ("k", keys), ("v", keys))}
        own |= {"o_proj.weight": (width, heads)}
        if c["attention_bias"]:
            own |= {"q_proj.bias": (heads,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
        if c["attention_bias"] if qwen3 else c["attention_output_bias"]:
            own |= {"o_proj.bias": (width,)}
        own |= {f"{n}_norm.weight": (form["dim"],) for n in "qk" if qwen3}
        if not self.softmax(i):
            own |= self._seven(i, width, heads) if self.seven else self._six(width, heads)
            own |= {"ln_x.weight": (heads,), "ln_x.bias": (heads,)} if form["norm"] else {}
            if form["gate"] == 1:
                own |= {"gate.weight": (heads, width)}
            elif form["gate"] == 2:
                own |= {"g1": (width, c["lora_rank_gate"]), "g2": (c["lora_rank_gate"], heads)}
        return {**{f"self_attn.{n}": shape for n, shape in own.items()}, **mlp_shapes(c)}

    def _six(self, width: int, heads: int) -> Shapes:
        shift, decay = (self.config[f"lora_rank_{n}"] for n in ("tokenshift", "decay"))
        own: Shapes = {"time_decay": (1, 1, heads), "time_decay_w1": (width, decay), "time_decay_w2": (decay, heads)}
        if self.form["shift"]:
            own |= {f"time_maa_{n}": (1, 1, width) for n in "xrkvwg"}
            own |= {"time_maa_w1": (width, 5 * shift), "time_maa_w2": (5, shift, width)}
        return own

    def _seven(self, i: int, width: int, heads: int) -> Shapes:
        """Files have the parameters of every form; the first one has no share of its own values in its first layer."""
        own: Shapes = {n: (1, 1, heads) for n in ("k_k", "k_a")}
        own |= {"r_k": (self.config["num_attention_heads"], heads // self.config["num_attention_heads"])}
        for name, rank in (("w", "decay"), ("a", "iclr"), ("v", "value_residual_mix")):
            low = self.config[f"lora_rank_{rank}"]
            if name != "v" or i or not self.first:
                own |= {f"{name}0": (1, 1, heads), f"{name}1": (width, low), f"{name}2": (low, heads)}
        return own | ({f"x_{n}": (1, 1, width) for n in "rwkvag"} if self.first else {})

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        form, groups = self.form, self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        x, first = self.embedded(ids), None
        turn = turns(torch.arange(ids.shape[1]), form["dim"], self.config["rope_theta"])
        for i in range(self.config["num_hidden_layers"]):
            w = self.layer(i)
            own = {n.removeprefix("self_attn."): t for n, t in w.items() if n.startswith("self_attn.")}
            h = rms(x, w["input_layernorm.weight"])
            parts = self._parts(h, own) if form["shift"] else dict.fromkeys("rwkvag", h)
            if form["shift"]:
                seen.conv[i] = h[:, -1:].transpose(1, 2)
            q, k, v = (
                (parts[part] @ own[f"{n}_proj.weight"].T + own.get(f"{n}_proj.bias", 0.0)).unflatten(
                    -1, (-1, form["dim"])
                )
                for n, part in (("q", "r"), ("k", "k"), ("v", "v"))
            )
            if "q_norm.weight" in own:
                q, k = rms(q, own["q_norm.weight"]), rms(k, own["k_norm.weight"])
            if form["rope"]:
                q, k = turned(q, turn), turned(k, turn)
            k, v = (y.repeat_interleave(groups, 2) for y in (k, v))
            if self.softmax(i):
                heads = (y.transpose(1, 2) for y in (q, k, v))
                out = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            else:
                if self.seven:
                    out, state, v = self._rwkv7(q, k, v, parts, own, first)
                    first = v if first is None else first
                else:
                    out, state = self._rwkv6(q, k, v, parts, own)
                seen.recurrent[i] = state
                if form["gate"] == 1:
                    out = out * (parts["g"] @ own["gate.weight"].T).sigmoid()
                elif form["gate"] == 2:
                    out = out * ((parts["g"] @ own["g1"]).sigmoid() @ own["g2"])
            x = x + out @ own["o_proj.weight"].T + own.get("o_proj.bias", 0.0)
            x = x + mlp(x, w)
        return self.read_out(x)

    def _parts(self, h: Tensor, own: dict[str, Tensor]) -> dict[str, Tensor]:
        off = pad(h, (0, 0, 1, 0))[:, :-1] - h
        if self.seven:
            return {n: h + off * own[f"x_{n}"] for n in "rwkvag"}
        low = ((h + off * own["time_maa_x"]) @ own["time_maa_w1"]).tanh().unflatten(-1, (5, -1))
        more = torch.einsum("btnr,nrc->nbtc", low, own["time_maa_w2"])
        return {n: h + off * (own[f"time_maa_{n}"] + part) for n, part in zip("rkvwg", more, strict=True)}

    def _headed(self, y: Tensor, own: dict[str, Tensor]) -> Tensor:
        """The norm of each head, or its scale in its place."""
        heads, dim = y.shape[2:]
        if not self.form["norm"]:
            return y.flatten(2) * dim**-0.5
        return group_norm(y.flatten(0, 1).flatten(1), heads, own["ln_x.weight"], own["ln_x.bias"], dim * 1e-5).view(
            *y.shape[:2], -1
        )

    def _rwkv6(
        self, q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor], own: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        forget = own["time_decay"] + (parts["w"] @ own["time_decay_w1"]).tanh() @ own["time_decay_w2"]
        kept = (-forget.exp()).clamp(min=-5).exp().unflatten(-1, q.shape[2:])
        k = k * (1 - kept) if self.form["balanced"] else k
        state, outputs = q.new_zeros(len(q), q.shape[2], q.shape[3], q.shape[3]), []
        for t in range(q.shape[1]):
            state = kept[:, t, ..., None] * state + k[:, t, ..., None] * v[:, t, :, None]  # [B, H, K, V]
            outputs.append((q[:, t, ..., None] * state).sum(2))
        out = torch.stack(outputs, 1)
        scaled = out * q.shape[-1] ** -0.5
        return (self._headed(scaled, own) if self.form["norm"] else scaled.flatten(2)), state

    def _rwkv7(
        self, q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor], own: dict[str, Tensor], first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        def low(n: str, activation: Any = None) -> Tensor:
            inner = parts[n] @ own[f"{n}1"]
            return (own[f"{n}0"] + (inner if activation is None else activation(inner)) @ own[f"{n}2"]).unflatten(
                -1, q.shape[2:]
            )

        kept = (-math.exp(-0.5) * low("w", torch.tanh).sigmoid()).exp()
        rate = low("a").sigmoid()
        if first is not None:
            v = torch.lerp(v, first, low("v").sigmoid())
        scaled = self.config["model_type"] == "rwkv7qwen2" and not self.form["balanced"]
        unit = normalize(k * own["k_k"].view(q.shape[2:]) if scaled else k, dim=-1)
        if self.form["balanced"]:
            k = k * (1 - kept + rate)
        elif scaled:
            k = k * (1 + (rate - 1) * own["k_a"].view(q.shape[2:]))
        state, outputs = q.new_zeros(len(q), q.shape[2], q.shape[3], q.shape[3]), []
        for t in range(q.shape[1]):
            move = torch.diag_embed(kept[:, t]) - unit[:, t, ..., None] * (rate * unit)[:, t, :, None]
            state = state @ move + v[:, t, ..., None] * k[:, t, :, None]  # [B, H, V, K]
            outputs.append((state @ q[:, t, ..., None]).squeeze(-1))
        out = self._headed(torch.stack(outputs, 1), own)
        if self.first:
            out = out + ((q * k * own["r_k"]).sum(-1, True) * v).flatten(2)
        return out, state.transpose(2, 3), v
