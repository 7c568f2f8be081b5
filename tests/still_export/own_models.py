"""Random models of families whose published folders have code of their own: their formulas, one token after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import (
    conv1d,
    gelu,
    group_norm,
    layer_norm,
    normalize,
    pad,
    scaled_dot_product_attention,
    silu,
    softplus,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.block_cases import Layer, attended, chosen
from tests.still_export.fla_models import States, turned

Draw = Callable[[str, tuple[int, ...]], Tensor]
Shapes = dict[str, tuple[int, ...]]
COMMON: dict[str, Any] = dict(vocab_size=61, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None)
LLAMA: dict[str, Any] = dict(hidden_size=24, intermediate_size=44, num_hidden_layers=3)


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


def turns(places: Tensor, dim: int, theta: float) -> Tensor:
    """Rotations complex128 [T, 1, dim / 2] of tokens at `places` [T]."""
    angles = places[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def mlp_shapes(config: dict[str, Any]) -> Shapes:
    """Of a layer's norms and its gated MLP, as Llama has them."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    shapes |= {f"mlp.{x}_proj.weight": (inner, width) for x in ("gate", "up")}
    return {**shapes, "mlp.down_proj.weight": (width, inner)}


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """What Llama's MLP adds to x."""
    h = rms(x, w["post_attention_layernorm.weight"])
    return (silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


class TransNormerModel(OwnModel):
    """TransNormerLLM; three heads, so that the slopes are those of no power of two."""

    sizes: ClassVar[dict[str, Any]] = dict(
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
        x = self.embedded(ids)
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


class SalaModel(OwnModel):
    """MiniCPM-SALA: a sparse layer, a Lightning one, a sparse one; blocks as published, made small.

    prompt: Tokens of a prompt by whose length its layers go, as the published code does; 0: each token goes by its own place.
    """

    prompt = 0

    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        lightning_nh=3,
        lightning_nkv=3,
        lightning_head_dim=10,
        lightning_scale="1/sqrt(d)",
        lightning_use_rope=True,
        attn_use_rope=False,
        attn_use_output_gate=True,
        use_output_gate=True,
        use_output_norm=True,
        qk_norm=True,
        mixer_types=["minicpm4", "lightning-attn", "minicpm4"],
        sparse_config=dict(
            kernel_size=4,
            kernel_stride=2,
            init_blocks=1,
            block_size=8,
            window_size=16,
            topk=3,
            use_nope=False,
            dense_len=48,
        ),
        scale_emb=3,
        scale_depth=1.4,
        dim_model_base=12,
        rope_theta=1000.0,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        max_position_embeddings=512,
        attention_bias=False,
    )

    def layer_shapes(self, i: int) -> Shapes:
        c = self.config
        width, dim = c["hidden_size"], c["head_dim"]
        sparse = c["mixer_types"][i] == "minicpm4"
        heads, kept = ("num_attention_heads", "num_key_value_heads") if sparse else ("lightning_nh", "lightning_nkv")
        size, keys = c[heads] * dim, (c[kept] or c[heads]) * dim
        own: dict[str, tuple[int, ...]] = {"q_proj.weight": (size, width), "o_proj.weight": (width, size)}
        own |= {f"{x}_proj.weight": (keys, width) for x in "kv"}
        if sparse and c["attn_use_output_gate"]:
            own["o_gate.weight"] = (size, width)
        if not sparse:
            own |= {"z_proj.weight": (size, width)} if c["use_output_gate"] else {}
            own |= {"o_norm.weight": (size,)} if c["use_output_norm"] else {}
            own |= {f"{x}_norm.weight": (dim,) for x in "qk"} if c["qk_norm"] else {}
        own = {f"self_attn.{name}": shape for name, shape in own.items()}
        own |= mlp_shapes(c)
        return own

    @property
    def blocks(self) -> Layer:
        """How a sparse layer chooses."""
        c, s = self.config, self.config["sparse_config"]
        window = s["window_size"] // s["block_size"]
        choice = dict(
            block_size=s["block_size"],
            mean_stride=s["kernel_stride"],
            mean_length=s["kernel_size"],
            init_blocks=s["init_blocks"],
        )
        choice |= dict(
            init_blocks=s["init_blocks"],
            lse_stride=4 * s["kernel_stride"],
            lse_length=4 * s["kernel_size"],
            local_blocks=window,
        )
        choice |= dict(top_blocks=s["topk"] + window, dense_length=s["dense_len"])
        return Layer(
            c["num_attention_heads"], c["num_key_value_heads"] or c["num_attention_heads"], c["head_dim"], choice=choice
        )

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, dim = self.config, self.config["head_dim"]
        x = self.embedded(ids) * c["scale_emb"]
        turn = turns(torch.arange(ids.shape[1]), dim, c["rope_theta"])
        scale = c["scale_depth"] / c["num_hidden_layers"] ** 0.5
        for i, kind in enumerate(c["mixer_types"]):
            w = self.layer(i)
            own = {n.removeprefix("self_attn."): t for n, t in w.items() if n.startswith("self_attn.")}
            h = rms(x, w["input_layernorm.weight"])
            q, k, v = ((h @ own[f"{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv")
            if kind == "minicpm4" and c["attn_use_rope"]:
                q, k = turned(q, turn), turned(k, turn)
            if kind == "minicpm4":
                ends = [max(self.prompt, p + 1) for p in range(ids.shape[1])]
                rows = [
                    attended(self.blocks, q[b], k[b], v[b], chosen(self.blocks, q[b], k[b], ends)[0])
                    for b in range(len(q))
                ]
                output = torch.stack(rows).to(x.dtype).flatten(2)
                gate = own.get("o_gate.weight")
            else:
                if c["qk_norm"]:
                    q, k = rms(q, own["q_norm.weight"]), rms(k, own["k_norm.weight"])
                if c["lightning_use_rope"]:
                    q, k = turned(q, turn), turned(k, turn)
                heads = q.shape[2]
                k, v = (y.repeat_interleave(heads // y.shape[2], 2) for y in (k, v))
                q = q * dim ** {"1/sqrt(d)": -0.5, "1/d": -1.0}[c["lightning_scale"]]
                output, seen.recurrent[i] = recurrence(q, k, v, torch.tensor(alibi(heads), dtype=torch.float64))
                output = output.flatten(2)
                output = rms(output, own["o_norm.weight"]) if c["use_output_norm"] else output
                gate = own.get("z_proj.weight")
            output = output if gate is None else output * (h @ gate.T).sigmoid()
            x = x + scale * (output @ own["o_proj.weight"].T)
            x = x + scale * mlp(x, w)
        hidden = rms(x, self.tensors["model.norm.weight"]) * c["dim_model_base"] / c["hidden_size"]
        return hidden @ self.tensors["lm_head.weight"].T


class Rwkv7Model(OwnModel):
    """RWKV-7, the state as the paper has it: rows are values."""

    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        head_dim=8,
        decay_low_rank_dim=5,
        gate_low_rank_dim=6,
        a_low_rank_dim=7,
        v_low_rank_dim=3,
        hidden_act="sqrelu",
        norm_first=True,
        norm_bias=True,
        norm_eps=1e-5,
        fuse_norm=False,
        value_dim=[24] * 3,
    )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        width, inner = c["hidden_size"], c["intermediate_size"]
        embeddings = (c["vocab_size"], width)
        found: dict[str, tuple[int, ...]] = {"model.embeddings.weight": embeddings, "lm_head.weight": embeddings}
        norms = ["model.norm"]
        for i in range(c["num_hidden_layers"]):
            own: dict[str, tuple[int, ...]] = {f"attn.{x}_proj.weight": (width, width) for x in "rkvo"}
            own |= {f"attn.x_{x}": (1, 1, width) for x in "rwkvag"}
            own |= {"attn.k_k": (width,), "attn.k_a": (width,), "attn.r_k": (width // c["head_dim"], c["head_dim"])}
            for x, rank in {"w": "decay", "a": "a", "v": "v", "g": "gate"}.items():
                low = c[f"{rank}_low_rank_dim"]
                if i or x != "v":
                    own |= {f"attn.{x}_lora.lora.0.weight": (low, width), f"attn.{x}_lora.lora.2.weight": (width, low)}
                    own |= {f"attn.{x}_lora.lora.2.bias": (width,)} if x != "g" else {}
            own |= {"attn.g_norm.weight": (width,), "attn.g_norm.bias": (width,), "ffn.x_k": (width,)}
            own |= {"ffn.key.weight": (inner, width), "ffn.value.weight": (width, inner)}
            found |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
            norms += [
                f"model.layers.{i}.{x}_norm" for x in ("attn", "ffn", *(["pre"] if not i and c["norm_first"] else []))
            ]
        for name in norms:
            found |= {f"{name}.{x}": (width,) for x in ("weight", *(["bias"] if c["norm_bias"] else []))}
        return found

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, first = self.config, None
        x = self.tensors["model.embeddings.weight"][ids]
        heads = c["hidden_size"] // c["head_dim"]

        def normed(h: Tensor, name: str) -> Tensor:
            weight, bias = (self.tensors.get(f"{name}.{kind}") for kind in ("weight", "bias"))
            return layer_norm(h, h.shape[-1:], weight, bias, c["norm_eps"])

        def before(h: Tensor, layer: int) -> Tensor:
            seen.conv[layer] = h[:, -1:].transpose(1, 2)
            return pad(h, (0, 0, 1, 0))[:, :-1]

        for i in range(c["num_hidden_layers"]):
            name, w = f"model.layers.{i}", self.layer(i)
            x = normed(x, f"{name}.pre_norm") if f"{name}.pre_norm.weight" in self.tensors else x
            h = normed(x, f"{name}.attn_norm")
            past = before(h, 2 * i)
            own = {n.removeprefix("attn."): t for n, t in w.items() if n.startswith("attn.")}
            r, d, k, v, a, g = (h * (1 - own[f"x_{n}"]) + past * own[f"x_{n}"] for n in "rwkvag")

            def low(y: Tensor, n: str, activation: Any, own: dict[str, Tensor] = own) -> Tensor:
                inner = activation(y @ own[f"{n}_lora.lora.0.weight"].T)
                return inner @ own[f"{n}_lora.lora.2.weight"].T + own.get(f"{n}_lora.lora.2.bias", 0.0)

            kept = (-math.exp(-0.5) * low(d, "w", torch.tanh).sigmoid()).exp()
            rate, gate = low(a, "a", lambda y: y).sigmoid(), low(g, "g", torch.sigmoid)
            r, k = r @ own["r_proj.weight"].T, k @ own["k_proj.weight"].T
            share = low(v, "v", lambda y: y).sigmoid() if first is not None else None
            v = v @ own["v_proj.weight"].T
            v = v if share is None else torch.lerp(v, first, share)  # type: ignore[arg-type]
            first = v if first is None else first
            unit = (k * own["k_k"]).unflatten(-1, (heads, -1))
            unit = normalize(unit, dim=-1) if not c["fuse_norm"] else unit / (unit.square().sum(-1, True) + 1e-6).sqrt()
            k = k * (1 + (rate - 1) * own["k_a"])
            r, k, v, kept, rate = (y.unflatten(-1, (heads, -1)) for y in (r, k, v, kept, rate))
            state, outputs = x.new_zeros(len(x), heads, c["head_dim"], c["head_dim"]), []
            for t in range(x.shape[1]):
                move = torch.diag_embed(kept[:, t]) - unit[:, t, ..., None] * (rate * unit)[:, t, :, None]
                state = state @ move + v[:, t, ..., None] * k[:, t, :, None]  # [B, H, V, K]
                outputs.append((state @ r[:, t, ..., None]).squeeze(-1))
            seen.recurrent[2 * i] = state.transpose(2, 3)
            output = torch.stack(outputs, 1).flatten(0, 1).flatten(1)
            output = group_norm(output, heads, own["g_norm.weight"], own["g_norm.bias"], c["head_dim"] * c["norm_eps"])
            output = output.view_as(x) + ((r * k * own["r_k"]).sum(-1, True) * v).flatten(2)
            x = x + (output * gate) @ own["o_proj.weight"].T
            h = normed(x, f"{name}.ffn_norm")
            h = h + (before(h, 2 * i + 1) - h) * w["ffn.x_k"]
            x = x + (h @ w["ffn.key.weight"].T).relu().square() @ w["ffn.value.weight"].T
        return normed(x, "model.norm") @ self.tensors["lm_head.weight"].T


class Rwkv6Model(OwnModel):
    """RWKV-5 and RWKV-6 as their published folders have them, the state as the paper has it: read before a token, whose own part has a
    bonus."""

    names = ("rwkv.embeddings", "head", "rwkv.ln_out", "rwkv.blocks")
    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        attention_hidden_size=24,
        head_size=8,
        head_size_divisor=8,
        layer_norm_epsilon=1e-5,
        rescale_every=6,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    ranks: ClassVar[dict[str, int]] = {"time_mix_rank": 5, "time_decay_rank": 7}
    """Of RWKV-6."""

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        self.old = family == "rwkv5"
        super().__init__(family, draw, **({} if self.old else self.ranks), **changes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        width, inner, head = c["hidden_size"], c["intermediate_size"], c["head_size"]
        pairs = (width // head, head)
        embeddings = (c["vocab_size"], width)
        found: dict[str, tuple[int, ...]] = {"rwkv.embeddings.weight": embeddings, "head.weight": embeddings}
        norms = ["rwkv.ln_out"]
        parts = ("key", "value", "receptance", "gate") if self.old else "wkvrg"
        for i in range(c["num_hidden_layers"]):
            mixed = "time_mix_{}" if self.old else "time_maa_{}"
            own: dict[str, tuple[int, ...]] = {f"attention.{mixed.format(x)}": (1, 1, width) for x in parts}
            own |= {f"attention.{x}.weight": (width, width) for x in ("key", "value", "receptance", "gate", "output")}
            own |= {"attention.time_faaaa": pairs, "attention.time_decay": pairs if self.old else (1, 1, width)}
            if not self.old:
                mix, decay = c["time_mix_rank"], c["time_decay_rank"]
                own |= {"attention.time_maa_x": (1, 1, width), "attention.time_maa_w1": (width, 5 * mix)}
                own |= {"attention.time_maa_w2": (5, mix, width)}
                own |= {"attention.time_decay_w1": (width, decay), "attention.time_decay_w2": (decay, width)}
            shares = ("key", "receptance") if self.old else "kr"
            own |= {f"feed_forward.{mixed.format(x)}": (1, 1, width) for x in shares}
            own |= {"feed_forward.key.weight": (inner, width), "feed_forward.value.weight": (width, inner)}
            own |= {"feed_forward.receptance.weight": (width, width)}
            found |= {f"rwkv.blocks.{i}.{name}": shape for name, shape in own.items()}
            norms += [f"rwkv.blocks.{i}.{x}" for x in ("ln1", "ln2", "attention.ln_x", *([] if i else ["pre_ln"]))]
        return found | {f"{name}.{x}": (width,) for name in norms for x in ("weight", "bias")}

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, heads = self.config, self.config["hidden_size"] // self.config["head_size"]
        x = self.tensors["rwkv.embeddings.weight"][ids]

        def normed(h: Tensor, name: str) -> Tensor:
            weight, bias = (self.tensors[f"{name}.{kind}"] for kind in ("weight", "bias"))
            return layer_norm(h, h.shape[-1:], weight, bias, c["layer_norm_epsilon"])

        def before(h: Tensor, layer: int, columns: int) -> Tensor:
            seen.conv[layer] = pad(h, (0, 0, columns, 0))[:, -columns:].transpose(1, 2)
            return pad(h, (0, 0, 1, 0))[:, :-1]

        for i in range(c["num_hidden_layers"]):
            name, w = f"rwkv.blocks.{i}", self.layer(i)
            x = normed(x, f"{name}.pre_ln") if i == 0 else x
            h = normed(x, f"{name}.ln1")
            past = before(h, 2 * i, 2)
            a = {n.removeprefix("attention."): t for n, t in w.items() if n.startswith("attention.")}
            if self.old:
                parts = ("key", "value", "receptance", "gate")
                k, v, r, g = (h * a[f"time_mix_{n}"] + past * (1 - a[f"time_mix_{n}"]) for n in parts)
                decay = a["time_decay"].flatten().expand_as(x)
            else:
                shares = torch.tanh((h + (past - h) * a["time_maa_x"]) @ a["time_maa_w1"]).unflatten(-1, (5, -1))
                more = torch.einsum("btnr,nrc->nbtc", shares, a["time_maa_w2"])
                d, k, v, r, g = (h + (past - h) * (a[f"time_maa_{n}"] + m) for n, m in zip("wkvrg", more, strict=True))
                decay = a["time_decay"] + torch.tanh(d @ a["time_decay_w1"]) @ a["time_decay_w2"]
            r, k, v, g = (y @ a[f"{n}.weight"].T for n, y in {"receptance": r, "key": k, "value": v, "gate": g}.items())
            r, k, v, kept = (y.unflatten(-1, (heads, -1)) for y in (r, k, v, (-decay.exp()).exp()))
            state, outputs = x.new_zeros(len(x), heads, c["head_size"], c["head_size"]), []
            for t in range(x.shape[1]):
                seen.recurrent[2 * i] = state
                own = k[:, t, :, :, None] * v[:, t, :, None]  # [B, H, K, V]
                outputs.append((r[:, t, :, :, None] * (a["time_faaaa"][:, :, None] * own + state)).sum(2))
                state = kept[:, t, :, :, None] * state + own
            epsilon = c["layer_norm_epsilon"] * c["head_size_divisor"] ** 2
            rows = torch.stack(outputs, 1).flatten(0, 1).flatten(1)
            rows = group_norm(rows, heads, a["ln_x.weight"], a["ln_x.bias"], epsilon).view_as(x)
            x = x + (rows * silu(g)) @ a["output.weight"].T
            h = normed(x, f"{name}.ln2")
            past = before(h, 2 * i + 1, 1)
            f = {n.removeprefix("feed_forward."): t for n, t in w.items() if n.startswith("feed_forward.")}
            if self.old:
                k, r = (h * f[f"time_mix_{n}"] + past * (1 - f[f"time_mix_{n}"]) for n in ("key", "receptance"))
            else:
                k, r = (h + (past - h) * f[f"time_maa_{n}"] for n in "kr")
            inner = (k @ f["key.weight"].T).relu().square() @ f["value.weight"].T
            x = x + (r @ f["receptance.weight"].T).sigmoid() * inner
        return normed(x, "rwkv.ln_out") @ self.tensors["head.weight"].T


class VisionModel(OwnModel):
    """PolaFormer's, InLine's and MirrorLA's attention by their formulas, whose n is the number of tokens so far."""

    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        num_attention_heads=3,
        num_key_value_heads=3,
        qkv_bias=True,
    )

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        kind = {"kernel_size": 5 if family == "polaformer" else 0}
        kind |= {"mirrors": 5, "head_mirrors": 2} if family == "mirrorla" else {"mirrors": 0}
        super().__init__(family, draw, **{**kind, **changes})
        for name in [n for n in self.tensors if n.endswith(".mirrors")]:
            # Two reflections of blocks of channels, the others of all.
            self.tensors[name] = self.tensors[name].clone()
            self.tensors[name][0, 4:] = 0
            self.tensors[name][1, :4] = self.tensors[name][1, 8:] = 0

    def layer_shapes(self, i: int) -> Shapes:
        c = self.config
        width, heads = c["hidden_size"], c["num_attention_heads"]
        polar, taps = c["model_type"] == "polaformer", c["kernel_size"]
        names = "qkvg" if polar else "qkv"
        own: dict[str, tuple[int, ...]] = {f"attn.{x}_proj.weight": (width, width) for x in (*names, "o")}
        own |= {f"attn.{x}_proj.bias": (width,) for x in (*(names if c["qkv_bias"] else ""), "o")}
        own |= {"attn.mirrors": (c["mirrors"], width)} if c["mirrors"] else {}
        own |= {"attn.head_mirrors": (c["head_mirrors"], heads)} if c.get("head_mirrors") else {}
        size = width // heads
        if taps and not polar:
            own |= {"attn.residual.0.weight": (width, size, 1), "attn.residual.2.weight": (width * taps, size, 1)}
            own |= {"attn.residual.0.bias": (width,), "attn.residual.2.bias": (width * taps,)}
        if polar:
            own |= {"attn.power": (heads, size), "attn.scale": (width,), "attn.dwc.bias": (size,)}
            own["attn.dwc.weight"] = (size, 1, c["kernel_size"])
        own |= mlp_shapes(c)
        return own

    def residual(self, w: dict[str, Tensor], h: Tensor, v: Tensor) -> Tensor:
        """InLine's: of each channel the latest values, weighted as convolutions in groups say of the mean input so far, [B, T, C]."""
        heads, taps = self.config["num_attention_heads"], self.config["kernel_size"]
        found = torch.zeros_like(v)
        for t in range(h.shape[1]):
            mean = h[:, : t + 1].mean(1)[..., None]  # [B, C, 1]
            inner = gelu(conv1d(mean, w["attn.residual.0.weight"], w["attn.residual.0.bias"], groups=heads))
            weights = conv1d(inner, w["attn.residual.2.weight"], w["attn.residual.2.bias"], groups=heads)
            weights = weights[..., 0].unflatten(1, (-1, taps))  # [B, C, taps]
            for back in range(min(taps, t + 1)):
                found[:, t] += weights[..., back] * v[:, t - back]
        return found

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, heads = self.config, self.config["num_attention_heads"]
        x = self.embedded(ids)
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            h = rms(x, w["input_layernorm.weight"])

            def linear(y: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
                return y @ w[f"attn.{name}_proj.weight"].T + w.get(f"attn.{name}_proj.bias", 0.0)

            wide = {n: linear(h, n) for n in "qkv"}
            for mirror in w.get("attn.mirrors", []):
                unit = mirror / mirror.norm()
                wide |= {n: wide[n] - 2 * (wide[n] @ unit)[..., None] * unit for n in "qk"}
            for mirror in w.get("attn.head_mirrors", []):
                across = torch.eye(heads, dtype=mirror.dtype) - 2 * torch.outer(mirror, mirror) / mirror.square().sum()
                for n in "qk":
                    wide[n] = torch.einsum("gh,bthd->btgd", across, wide[n].unflatten(-1, (heads, -1))).flatten(2)
            q, k, v = (wide[n].unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")  # [B, H, T, D]
            scale, ones, outputs = q.shape[-1] ** -0.5, torch.ones_like(v[..., :1]), []
            taps = c["kernel_size"] if "attn.dwc.weight" in w else 0
            if taps:
                sharp = 1 + 4 * w["attn.power"].sigmoid()[:, None]
                q, k = (y / softplus(w["attn.scale"]).view(heads, 1, -1) for y in (q, k))
                (qa, qb), (ka, kb) = (((y.relu() ** sharp), ((-y).relu() ** sharp)) for y in (q, k))
                same, other, k = (torch.cat(y, -1) for y in ((qa, qb), (qb, qa), (ka, kb)))
            elif c["mirrors"] or c.get("feature_map") == "relu":
                q, k = q.relu(), k.relu()
            for t in range(ids.shape[1]):
                n, past, values = t + 1, k[:, :, : t + 1], v[:, :, : t + 1]
                if taps:
                    parts = []
                    for query, half in zip((same, other), values.chunk(2, -1), strict=True):
                        z = 1 / (query[:, :, t : t + 1] @ past.mean(2, keepdim=True).transpose(2, 3) + 1e-6)
                        parts.append(query[:, :, t : t + 1] @ (past.transpose(2, 3) @ half / n) * z)
                    outputs.append(torch.cat(parts, -1))
                elif c["mirrors"]:
                    weights = q[:, :, t : t + 1] @ past.transpose(2, 3)
                    outputs.append(weights @ values / (weights.sum(-1, keepdim=True) + 1e-6 * n))
                else:
                    own = q[:, :, t : t + 1]
                    rest = 1 - own @ past.mean(2, keepdim=True).transpose(2, 3) * scale
                    outputs.append(
                        own @ (past.transpose(2, 3) @ values) * scale / n + rest * values.mean(2, keepdim=True)
                    )
            keys = k if taps or c["mirrors"] else torch.cat((k, ones), -1)
            rows = torch.cat(outputs, 2).transpose(1, 2).flatten(2)
            kept: tuple[Tensor, ...] = (v,)
            if "attn.residual.0.weight" in w:
                kept, rows = (v, h.unflatten(-1, (heads, -1)).transpose(1, 2)), rows + self.residual(w, h, wide["v"])
                copies = wide["v"].repeat_interleave(c["kernel_size"], -1).transpose(1, 2)
                seen.conv[i] = copies[..., 1 - c["kernel_size"] :]
            seen.recurrent[i] = keys.transpose(2, 3) @ torch.cat((*kept, ones), -1) / ids.shape[1]
            if taps:
                columns = v.transpose(2, 3).flatten(1, 2)
                seen.conv[i] = columns[..., 1 - taps :]
                kernel = w["attn.dwc.weight"].repeat(heads, 1, 1)
                beside = conv1d(
                    pad(columns, (taps - 1, 0)), kernel, w["attn.dwc.bias"].repeat(heads), groups=len(kernel)
                )
                rows = (rows + beside.transpose(1, 2)) * linear(h, "g")
            x = x + linear(rows, "o")
            x = x + mlp(x, w)
        return self.read_out(x)


class MohModel(OwnModel):
    """MoH-LLaMA3: the mask of heads as it is published, behind softmax attention."""

    sizes: ClassVar[dict[str, Any]] = dict(
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        rope_theta=1000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
    )

    def layer_shapes(self, i: int) -> Shapes:
        c = self.config
        width = c["hidden_size"]
        keys = width // c["num_attention_heads"] * c["num_key_value_heads"]
        own: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (width, width) for x in "qo"}
        own |= {f"self_attn.{x}_proj.weight": (keys, width) for x in "kv"}
        own |= mlp_shapes(c)
        return own

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, heads = self.config, self.config["num_attention_heads"]
        shared, routed = c.get("shared_heads") or heads // 2, c.get("routed_heads") or heads // 4
        x, dim = self.embedded(ids), c["hidden_size"] // heads
        turn = turns(torch.arange(ids.shape[1]), dim, c["rope_theta"])
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            h = rms(x, w["input_layernorm.weight"])
            q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv")
            lengths = q[:, :, shared:].norm(dim=-1)
            mask = torch.zeros_like(lengths).scatter(-1, lengths.topk(routed).indices, 1.0)
            mask = torch.cat((mask.new_ones(*mask.shape[:2], shared), mask), -1)
            q, k, v = (y.transpose(1, 2) for y in (turned(q, turn), turned(k, turn), v))
            rows = (
                scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2) * mask[..., None]
            )
            x = x + rows.flatten(2) @ w["self_attn.o_proj.weight"].T
            x = x + mlp(x, w)
        return self.read_out(x)


class RatModel(OwnModel):
    """RAT: the scan one token after the other, softmax over the chunks' ends and the token's own key."""

    names = ("embedding.wte", "head.lm_head", "backbone.ln", "backbone.layers")
    sizes: ClassVar[dict[str, Any]] = dict(
        d_model=24,
        num_layers=3,
        d_head=6,
        ngroups=2,
        chunk_size=7,
        d_ffn=44,
    )

    def layer_shapes(self, i: int) -> Shapes:
        c = self.config
        width, few = c["d_model"], c["ngroups"] * c["d_head"]
        local = i % (c.get("interleave_step") or 1) > 0
        own: dict[str, tuple[int, ...]] = {
            "seq_layer.in_proj.weight": (3 * width + (0 if local else 2 * few), width),
            **({} if local else {"seq_layer.gate_bias": (width,)}),
            "seq_layer.input_norm.weight": (width,),
            "seq_layer.out_proj.weight": (width, width),
            "hidden_layer.ln.weight": (width,),
            "hidden_layer.fc1.weight": (c["d_ffn"], width),
            "hidden_layer.fc2.weight": (width, c["d_ffn"]),
        }
        return own

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x = self.config, self.embedded(ids)
        width, dim, size, few = c["d_model"], c["d_head"], c["chunk_size"], c["ngroups"] * c["d_head"]
        turn = turns(torch.arange(ids.shape[1]) // size, dim, c.get("base", 1e4))
        for i in range(c["num_layers"]):
            w = self.layer(i)
            h = rms(x, w["seq_layer.input_norm.weight"]) @ w["seq_layer.in_proj.weight"].T
            if "seq_layer.gate_bias" not in w:
                x = x + self.local(h, dim) @ w["seq_layer.out_proj.weight"].T
                x = (
                    x
                    + gelu(rms(x, w["hidden_layer.ln.weight"]) @ w["hidden_layer.fc1.weight"].T)
                    @ w["hidden_layer.fc2.weight"].T
                )
                continue
            z, v, g, q, k = h.split((width, width, width, few, few), -1)
            g = (g + w["seq_layer.gate_bias"]).sigmoid()
            q, k = (y.repeat(1, 1, width // few) for y in (q, k))
            u, g, scanned = torch.cat((v, k), -1), torch.cat((g, g), -1), list[Tensor]()
            state = torch.zeros_like(u[:, 0])
            for t in range(ids.shape[1]):
                state = (t % size > 0) * g[:, t] * state + (1 - g[:, t]) * u[:, t]
                scanned.append(state)
            seen.recurrent[i] = state[:, :, None]
            v, k = torch.stack(scanned, 1).chunk(2, -1)
            q, k, v = (y.unflatten(-1, (-1, dim)) for y in (q, k, v))
            q, k = turned(q, turn), turned(k, turn)
            place = torch.arange(ids.shape[1])
            ends = (place % size == size - 1) & (place // size < place[:, None] // size)
            scores = torch.einsum("bthd,bshd->bhts", q, k) / dim**0.5
            scores = scores.masked_fill(~(ends | (place == place[:, None])), -torch.inf)
            rows = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
            x = x + (z.sigmoid() * rows) @ w["seq_layer.out_proj.weight"].T
            h = gelu(rms(x, w["hidden_layer.ln.weight"]) @ w["hidden_layer.fc1.weight"].T)
            x = x + h @ w["hidden_layer.fc2.weight"].T
        return self.read_out(x)

    def local(self, projected: Tensor, dim: int) -> Tensor:
        """Softmax to the `window_size` tokens before each and itself, turned by tokens' positions."""
        v, q, k = (y.unflatten(-1, (-1, dim)) for y in projected.chunk(3, -1))
        place = torch.arange(q.shape[1])
        turn = turns(place, dim, self.config.get("base", 1e4))
        scores = torch.einsum("bthd,bshd->bhts", turned(q, turn), turned(k, turn)) / dim**0.5
        behind = place[:, None] - place
        scores = scores.masked_fill((behind < 0) | (behind > self.config["window_size"]), -torch.inf)
        return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)


class FluxModel(OwnModel):
    """Qwen3 with Flux Attention: layers are narrow and full in turn, by their routers' biases, whatever a call's first queries are."""

    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        toggle_type="streaming",
        retrieval_mode="full",
        pooling_mode="ctx_q",
        use_softmax=True,
        enable_ada_sparsity=True,
        sink_size=0,
        local_window_size=100,
        pool_size=5,
    )

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        super().__init__(family, draw, **changes)
        for i in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{i}.self_attn.mask_allocator.cls_router_head_agnostic.4"
            sign = 1 if i % 2 else -1
            self.tensors[f"{name}.bias"] = torch.tensor([-20.0 * sign, 20.0 * sign])

    def layer_shapes(self, i: int) -> Shapes:
        c = self.config
        width, dim = c["hidden_size"], c["head_dim"]
        size, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        router = {"cls_feat_extractor": {0: (dim, 8 * dim), 2: (8 * dim, 2 * dim)}}
        router["cls_router_head_agnostic"] = {0: (2 * dim, 4 * dim), 2: (4 * dim, dim), 4: (dim, 2)}
        own: dict[str, tuple[int, ...]] = {"q_proj.weight": (size, width), "o_proj.weight": (width, size)}
        own |= {f"{x}_proj.weight": (keys, width) for x in "kv"} | {f"{x}_norm.weight": (dim,) for x in "qk"}
        for part, layers in router.items():
            for place, (given, made) in layers.items():
                own |= {f"mask_allocator.{part}.{place}.weight": (made, given)}
                own |= {f"mask_allocator.{part}.{place}.bias": (made,)}
        own = {f"self_attn.{name}": shape for name, shape in own.items()}
        own |= {"self_attn.mask_allocator.log_temp": (1,)}
        own |= mlp_shapes(c)
        return own

    first: int | None = None
    """Tokens of the call that decides; None: all."""

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x, dim = self.config, self.embedded(ids), self.config["head_dim"]
        self.full: list[Tensor] = []
        turn = turns(torch.arange(ids.shape[1]), dim, c["rope_parameters"]["rope_theta"])
        place = torch.arange(ids.shape[1])
        block = place // 128
        near = block > block[:, None] - -(-c["local_window_size"] // 128)
        near = near | (block < -(-c["sink_size"] // 128))
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            h = rms(x, w["input_layernorm.weight"])
            q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv")
            q, k = rms(q, w["self_attn.q_norm.weight"]), rms(k, w["self_attn.k_norm.weight"])
            head, pool = q[:, : self.first], c["pool_size"]
            told = torch.cat((head[:, :pool], head[:, -pool:]), 1).mean(1).mean(1)
            for part, places in {"cls_feat_extractor": (0, 2), "cls_router_head_agnostic": (0, 2, 4)}.items():
                for at in places:
                    name = f"self_attn.mask_allocator.{part}.{at}"
                    told = told if at == 0 else silu(told)
                    told = told @ w[f"{name}.weight"].T + w[f"{name}.bias"]
            self.full.append(told.argmax(-1) == 1)
            seen.recurrent[i] = torch.where(self.full[-1], 1.0, -1.0).to(x.dtype)[:, None, None, None]
            q, k = turned(q, turn), turned(k, turn)
            mask = (place <= place[:, None]) & (near | self.full[-1][:, None, None])
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            rows = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
            x = x + rows.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T
            x = x + mlp(x, w)
        return self.read_out(x)


class Mamba3Model(OwnModel):
    """Mamba-3, step by step as its authors' reference has it; `seen` has the state without the last token's own term."""

    names = ("backbone.embeddings", "lm_head", "backbone.norm_f", "backbone.layers")
    sizes: ClassVar[dict[str, Any]] = dict(
        hidden_size=24,
        num_hidden_layers=2,
        expand=2,
        head_dim=8,
        state_size=10,
        n_groups=2,
        rope_fraction=0.5,
        A_floor=0.05,
        use_bias=False,
        norm_eps=1e-5,
        is_outproj_norm=False,
        is_mimo=False,
    )

    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        super().__init__(family, draw, **changes)
        for name, x in self.tensors.items():
            self.tensors[name] = x - 3 if name.endswith("dt_bias") else x  # steps of 0.002 to 0.1, as published

    def layer_shapes(self, i: int) -> Shapes:
        c = self.config
        width, dim, inner = c["hidden_size"], c["state_size"], c["expand"] * c["hidden_size"]
        heads, turned = inner // c["head_dim"], int(dim * c["rope_fraction"]) // 2
        channels = 2 * inner + 2 * c["n_groups"] * dim + 3 * heads + turned
        own: dict[str, tuple[int, ...]] = {"norm.weight": (width,), "mixer.in_proj.weight": (channels, width)}
        own |= {"mixer.dt_bias": (heads,), "mixer.D": (heads,), "mixer.out_proj.weight": (width, inner)}
        own |= {f"mixer.{x}_bias": (heads, 1, dim) for x in "BC"} | {f"mixer.{x}_norm.weight": (dim,) for x in "BC"}
        own |= {"mixer.in_proj.bias": (channels,), "mixer.out_proj.bias": (width,)} if c["use_bias"] else {}
        own |= {"mixer.norm.weight": (inner,)} if c["is_outproj_norm"] else {}
        return own

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x = self.config, self.embedded(ids)
        dim, size, groups, inner = c["state_size"], c["head_dim"], c["n_groups"], c["expand"] * c["hidden_size"]
        heads, turned = inner // size, int(dim * c["rope_fraction"]) // 2

        def normed(h: Tensor, weight: Tensor) -> Tensor:
            return h / ((h * h).mean(-1, keepdim=True) + c["norm_eps"]).sqrt() * weight

        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            h = normed(x, w["norm.weight"]) @ w["mixer.in_proj.weight"].T + w.get("mixer.in_proj.bias", 0.0)
            parts = (inner, inner, groups * dim, groups * dim, heads, heads, heads, turned)
            z, v, k, q, step, rate, share, angle = h.split(parts, -1)
            rate, step = -softplus(rate).clamp_min(c["A_floor"]), softplus(step + w["mixer.dt_bias"])
            share, angle = share.sigmoid(), angle.tanh() * torch.pi
            wide = torch.promote_types(x.dtype, torch.float32)  # of angles, as published kernels have them
            v, places = v.unflatten(-1, (heads, size)), x.new_zeros(len(x), heads, turned, dtype=wide)
            k, q = (
                normed(y.unflatten(-1, (groups, dim)), w[f"mixer.{n}_norm.weight"]).repeat_interleave(
                    heads // groups, 2
                )
                + w[f"mixer.{n}_bias"][:, 0]
                for y, n in ((k, "B"), (q, "C"))
            )
            state = last_k = last_v = x.new_zeros(())
            outputs = []
            for t in range(x.shape[1]):
                places = places + angle[:, t, None] * step[:, t, :, None]
                pairs = torch.polar(torch.ones_like(places), places)

                def turn(y: Tensor, pairs: Tensor = pairs) -> Tensor:
                    first = y[..., : 2 * turned].to(pairs.real.dtype).unflatten(-1, (-1, 2)).contiguous()
                    first = torch.view_as_real(torch.view_as_complex(first) * pairs).flatten(-2).to(y.dtype)
                    return torch.cat((first, y[..., 2 * turned :]), -1)

                now_q, now_k, alpha = turn(q[:, t]), turn(k[:, t]), (rate[:, t] * step[:, t]).exp()[..., None, None]
                before = ((1 - share[:, t]) * step[:, t])[..., None, None] * alpha
                own = (share[:, t] * step[:, t])[..., None, None]
                state = alpha * state + before * (last_k * last_v)
                seen.recurrent[i] = state.expand(len(x), heads, dim, size)
                last_k, last_v = now_k[..., None], v[:, t, :, None]
                state = state + own * (last_k * last_v)
                outputs.append((now_q[..., None] * state).sum(2) + w["mixer.D"][:, None] * v[:, t])
            seen.conv[i] = torch.cat((now_k.flatten(1), v[:, -1].flatten(1), own.flatten(1)), -1)[..., None]
            rows = torch.stack(outputs, 1)
            if c["is_outproj_norm"]:
                rows = normed(rows, w["mixer.norm.weight"].view(heads, size))
            rows = rows.flatten(2) * silu(z)
            x = x + rows @ w["mixer.out_proj.weight"].T + w.get("mixer.out_proj.bias", 0.0)
        return normed(x, self.tensors["backbone.norm_f.weight"]) @ self.tensors["lm_head.weight"].T


OWN: dict[str, type[OwnModel]] = {
    "mamba3": Mamba3Model,
    "flux_qwen3": FluxModel,
    "rat": RatModel,
    "moh_llama": MohModel,
    "transnormer": TransNormerModel,
    "minicpm_sala": SalaModel,
    "rwkv5": Rwkv6Model,
    "rwkv6": Rwkv6Model,
    "rwkv7": Rwkv7Model,
    "polaformer": VisionModel,
    "inline": VisionModel,
    "mirrorla": VisionModel,
}
"""By model_type."""
