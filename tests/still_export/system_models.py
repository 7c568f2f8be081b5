"""Models of research systems by their formulas, one token after the other: readings of vision models, MoH, RAT, Flux."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, pad, scaled_dot_product_attention, silu, softplus

from tests.still_export.own_models import LLAMA, Draw, OwnModel, Shapes, States, mlp, mlp_shapes, rms, turned, turns


class VisionModel(OwnModel):
    """PolaFormer's, InLine's and MirrorLA's attention by their formulas, whose n is the number of tokens so far."""

    sizes: ClassVar[dict[str, Any]] = dict(**LLAMA, num_attention_heads=3, num_key_value_heads=3, qkv_bias=True)

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
    sizes: ClassVar[dict[str, Any]] = dict(d_model=24, num_layers=3, d_head=6, ngroups=2, chunk_size=7, d_ffn=44)

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
