"""RWKV-5, RWKV-6 and RWKV-7 by their formulas, one token after the other."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import group_norm, layer_norm, normalize, pad, silu

from tests.still_export.own_models import LLAMA, Draw, OwnModel, States


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
