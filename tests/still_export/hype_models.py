"""Random models of HypeNet under their published names: their formulas, one token after the other."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.still_export.own_models import (
    SAID,
    OwnModel,
    Shapes,
    States,
    alibi,
    mlp,
    mlp_shapes,
    recurrence,
    rms,
    turned,
    turns,
)

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "places": dict(attn_logits_scaling="hype 50", lightning_nkv=None),
    "bare": dict(
        attn_logits_scaling="hype",
        attn_use_rope=True,
        attn_use_output_gate=False,
        lightning_use_rope=False,
        lightning_use_qk_norm=False,
        lightning_use_output_norm=False,
        lightning_use_output_gate=False,
        lightning_scale="1/d",
    ),
    "no positions": dict(
        attn_logits_scaling=1.5, lightning_use_rope=False, lightning_scale="1", lightning_nh=4, lightning_nkv=2
    ),
}
"""What is changed of its configuration."""


class HypeModel(OwnModel):
    """HypeNet; six heads, so that the slopes are those of no power of two."""

    sizes: ClassVar[dict[str, Any]] = dict(
        **SAID,
        architectures=["HypeNetForCausalLM"],
        attention_dropout=0.0,
        attn_logits_scaling=None,
        attn_use_rope=False,
        attn_use_output_gate=True,
        expand_kv_proj=True,
        head_dim=10,
        initializer_range=0.02,
        lightning_use_rope=True,
        lightning_rope_scaling=None,
        lightning_nh=6,
        lightning_nkv=6,
        lightning_head_dim=10,
        lightning_scale="1/sqrt(d)",
        lightning_use_qk_norm=True,
        lightning_use_output_norm=True,
        lightning_use_output_gate=True,
        lightning_use_short_conv=False,
        max_position_embeddings=1048576,
        mixer_types=["lightning-attn", "attn", "lightning_attn"],
        num_attention_heads=6,
        num_key_value_heads=2,
    )

    def heads(self, i: int) -> tuple[int, int]:
        """Of queries and of keys."""
        c = self.config
        own = c["num_attention_heads"], c["num_key_value_heads"]
        return own if c["mixer_types"][i] == "attn" else (c["lightning_nh"], c["lightning_nkv"] or own[1])

    def layer_shapes(self, i: int) -> Shapes:
        c, softmax = self.config, self.config["mixer_types"][i] == "attn"
        width, dim = c["hidden_size"], c["head_dim"]
        size, keys = (n * dim for n in self.heads(i))
        own: Shapes = {f"{n}_proj.weight": (rows, width) for n, rows in (("q", size), ("k", keys), ("v", keys))}
        own["o_proj.weight"] = (width, size)
        if softmax or c["lightning_use_qk_norm"]:
            own |= {f"{n}_norm.weight": (dim,) for n in "qk"}
        if softmax and c["attn_use_output_gate"]:
            own["o_gate.weight"] = (size, width)
        if not softmax:
            own |= {"o_norm.weight": (size,)} if c["lightning_use_output_norm"] else {}
            own |= {"z_proj.weight": (size, width)} if c["lightning_use_output_gate"] else {}
        return {**{f"self_attn.{n}": shape for n, shape in own.items()}, **mlp_shapes(c)}

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x, places = self.config, self.embedded(ids), torch.arange(ids.shape[1])
        turn = turns(places, c["head_dim"], c["rope_theta"])
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            h = rms(x, w["input_layernorm.weight"])
            own = {n.removeprefix("self_attn."): t for n, t in w.items() if n.startswith("self_attn.")}
            softmax, (heads, keys) = c["mixer_types"][i] == "attn", self.heads(i)
            q, k, v = ((h @ own[f"{n}_proj.weight"].T).unflatten(-1, (-1, c["head_dim"])) for n in "qkv")
            if "q_norm.weight" in own:
                q, k = rms(q, own["q_norm.weight"]), rms(k, own["k_norm.weight"])
            if c["attn_use_rope" if softmax else "lightning_use_rope"]:
                q, k = turned(q, turn), turned(k, turn)
            k, v = (y.repeat_interleave(heads // keys, 2) for y in (k, v))
            if softmax:
                q = q * self._query_scale(places).to(q.dtype)
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
                out = out.transpose(1, 2).flatten(2)
                gate = own.get("o_gate.weight")
            else:
                power = {"1/sqrt(d)": -0.5, "1/d": -1}.get(c["lightning_scale"], 0)
                slopes = torch.tensor(alibi(heads), dtype=torch.float64)
                out, seen.recurrent[i] = recurrence(q * c["head_dim"] ** power, k, v, slopes)
                out = out.flatten(2)
                out = rms(out, own["o_norm.weight"]) if "o_norm.weight" in own else out
                gate = own.get("z_proj.weight")
            out = out if gate is None else out * (h @ gate.T).sigmoid()
            x = x + out @ own["o_proj.weight"].T
            x = x + mlp(x, w)
        return self.read_out(x)

    def _query_scale(self, places: Tensor) -> Tensor:
        said = self.config["attn_logits_scaling"]
        if not isinstance(said, str):
            return torch.tensor(said or 1.0)
        origin = float(said.split()[1]) if " " in said else 362.0
        return ((places.double() + origin).log() / math.log(origin))[:, None, None]
