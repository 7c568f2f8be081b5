"""RecurrentGemma by its formulas, one token after the other."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import gelu, softplus

from tests.still_export.own_models import OwnModel, Shapes, States, rms, turned, turns


class RecurrentGemmaModel(OwnModel):
    """Two recurrent layers around one with a window; the recurrence has another width than the model."""

    names = ("model.embed_tokens", "model.embed_tokens", "model.final_norm", "model.layers")
    sizes: ClassVar[dict[str, Any]] = dict(
        hidden_size=24,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        lru_width=30,
        conv1d_width=4,
        attention_window_size=37,
        attention_bias=False,
        block_types=["recurrent", "attention"],
        rope_theta=1000.0,
        partial_rotary_factor=0.5,
        logits_soft_cap=5.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )

    def layer_shapes(self, i: int) -> Shapes:
        c, at = self.config, "temporal_block."
        width, inner, lru, heads = (
            c["hidden_size"],
            c["intermediate_size"] // 2,
            c["lru_width"],
            c["num_attention_heads"],
        )
        matrices = {"mlp_block.gate_proj": (inner, width), "mlp_block.up_proj": (inner, width)}
        matrices["mlp_block.down_proj"] = (width, inner)
        found: Shapes = {f"{name}.weight": (width,) for name in ("temporal_pre_norm", "channel_pre_norm")}
        if self.is_softmax(i):
            keys = width // heads * c["num_key_value_heads"]
            own = {f"{at}{name}_proj": (rows, width) for name, rows in zip("qkv", (width, keys, keys), strict=True)}
            found |= {f"{name}.weight": shape for name, shape in own.items()}
            found |= {f"{name}.bias": shape[:1] for name, shape in own.items() if c["attention_bias"]}
            matrices[f"{at}o_proj"] = (width, width)
        else:
            matrices |= {f"{at}linear_{name}": (lru, width) for name in "xy"}
            matrices[f"{at}linear_out"] = (width, lru)
            found |= {f"{at}conv_1d.weight": (lru, 1, c["conv1d_width"]), f"{at}conv_1d.bias": (lru,)}
            found[f"{at}rg_lru.recurrent_param"] = (lru,)
            for name in ("input_gate", "recurrent_gate"):
                found[f"{at}rg_lru.{name}_weight"] = (heads, lru // heads, lru // heads)
                found[f"{at}rg_lru.{name}_bias"] = (heads, lru // heads)
        found |= {f"{name}.weight": shape for name, shape in matrices.items()}
        return found | {f"{name}.bias": shape[:1] for name, shape in matrices.items()}

    def is_softmax(self, i: int) -> bool:
        kinds: list[str] = self.config["block_types"]
        return kinds[i % len(kinds)] == "attention"

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c = self.config
        x = self.embedded(ids) * float(torch.tensor(math.sqrt(c["hidden_size"])).bfloat16())
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            own = {n.removeprefix("temporal_block."): t for n, t in w.items()}
            h = rms(x, 1 + w["temporal_pre_norm.weight"])
            x = x + (self.attention(h, own) if self.is_softmax(i) else self.recurrence(h, own, i, seen))
            h = rms(x, 1 + w["channel_pre_norm.weight"])
            gate = gelu(affine(h, w, "mlp_block.gate_proj"), approximate="tanh")
            x = x + affine(gate * affine(h, w, "mlp_block.up_proj"), w, "mlp_block.down_proj")
        x = rms(x, 1 + self.tensors["model.final_norm.weight"]) @ self.tensors["model.embed_tokens.weight"].T
        return (x / c["logits_soft_cap"]).tanh() * c["logits_soft_cap"]

    def attention(self, h: Tensor, w: dict[str, Tensor]) -> Tensor:
        c, tokens = self.config, h.shape[1]
        dim, heads = c["hidden_size"] // c["num_attention_heads"], c["num_attention_heads"]
        q, k, v = (affine(h, w, f"{name}_proj").unflatten(-1, (-1, dim)) for name in "qkv")
        k, v = (x.repeat_interleave(heads // c["num_key_value_heads"], 2) for x in (k, v))
        part = int(dim * c["partial_rotary_factor"])
        turn = turns(torch.arange(tokens), part, c["rope_theta"])
        q, k = (torch.cat([turned(x[..., :part], turn), x[..., part:]], -1) for x in (q, k))
        apart = torch.arange(tokens)[:, None] - torch.arange(tokens)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(dim)
        scores = scores.masked_fill((apart < 0) | (apart >= c["attention_window_size"]), -math.inf)
        return affine(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2), w, "o_proj")

    def recurrence(self, h: Tensor, w: dict[str, Tensor], layer: int, seen: States) -> Tensor:
        c = self.config
        inputs, taps = affine(h, w, "linear_x"), c["conv1d_width"]
        padded = torch.cat([inputs.new_zeros(inputs.shape[0], taps - 1, inputs.shape[2]), inputs], 1)
        state, outputs = torch.zeros_like(inputs[:, 0]), []
        for t in range(h.shape[1]):
            x = (padded[:, t : t + taps] * w["conv_1d.weight"][:, 0].T).sum(1) + w["conv_1d.bias"]
            blocks = x.unflatten(-1, (c["num_attention_heads"], -1))
            read, forget = (
                (torch.einsum("bhi,hij->bhj", blocks, w[f"rg_lru.{name}_weight"]) + w[f"rg_lru.{name}_bias"])
                .flatten(1)
                .sigmoid()
                for name in ("input_gate", "recurrent_gate")
            )
            decay = -8 * forget * softplus(w["rg_lru.recurrent_param"])
            state = decay.exp() * state + (read * x if t == 0 else (-torch.expm1(2 * decay)).sqrt() * read * x)
            outputs.append(state)
        seen.recurrent[layer] = state[..., None, None]
        seen.conv[layer] = padded[:, -(taps - 1) :].transpose(1, 2)
        return affine(torch.stack(outputs, 1) * gelu(affine(h, w, "linear_y"), approximate="tanh"), w, "linear_out")


def affine(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    bias = w.get(f"{name}.bias")
    return x @ w[f"{name}.weight"].T + (0.0 if bias is None else bias)
