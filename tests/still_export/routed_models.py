"""Random models whose tokens read what was chosen, NAtS-L, Landmark attention and Routing Transformer, by their formulas."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.still_export.fla_models import FlaLayers
from tests.still_export.own_models import LLAMA, OwnModel, Shapes, States, mlp, mlp_shapes, rms, turned, turns
from tests.still_graphs.test_landmark_attention import retrieved


class RoutedModel(OwnModel):
    """`choices` are those of the latest forward, layer by layer, and `gaps` how clear each was; `told`: choices in their place."""

    told: list[Tensor] | None = None

    def choose(self, found: Tensor, gaps: Tensor) -> Tensor:
        found = found if self.told is None else self.told[len(self.choices)]
        self.choices.append(found)
        self.gaps.append(gaps)
        return found

    def __call__(self, ids: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        self.choices: list[Tensor] = []
        self.gaps: list[Tensor] = []
        return super().__call__(ids, use_cache)

    def told_ids(self, tokens: int) -> list[Tensor]:
        """`told` as a router's choices [B, T, k], -1 where nothing is told."""
        return []


class NatsModel(RoutedModel, FlaLayers):
    """NAtS-L beside a layer that is a plain gated delta rule."""

    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        num_heads=2,
        num_attn_heads=4,
        num_v_heads=None,
        num_nats_head=None,
        head_dim=10,
        expand_v=1.6,
        conv_size=4,
        n_ops=2,
        nats_block_size=64,
        ops_for_incomplete_chunks="all",
        attn_qk_norm=True,
        attn_with_short_conv=True,
        attn_apply_pos_encoding=False,
        decay_for_non_gdn_blocks=True,
        allow_neg_eigval=False,
        use_gate=True,
        use_short_conv=True,
        gdn_layers=[1],
        hidden_act="swish",
        norm_eps=1e-6,
        bos_token_id=1,
    )

    def mixer_shapes(self, i: int) -> Shapes:
        c, width = self.config, self.config["hidden_size"]
        heads, softmax, routes = c["num_heads"], c["num_attn_heads"], c["num_nats_head"] or c["num_heads"]
        keys, values = heads * c["head_dim"], int(heads * c["head_dim"] * c["expand_v"])
        channels = {"q": keys, "k": keys, "v": values}
        own: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (n, width) for x, n in channels.items()}
        own |= {f"{x}_conv1d.weight": (n, 1, c["conv_size"]) for x, n in channels.items()}
        own |= {f"{x}_proj.weight": (heads, width) for x in "ab"} | {"A_log": (heads,), "dt_bias": (heads,)}
        own |= {"g_proj.weight": (values, width), "o_proj.weight": (width, values)}
        if i in c["gdn_layers"]:
            own["o_norm.weight"] = (values // heads,)
        else:
            own |= {f"o_norm.weight{n}": (values // softmax,) for n in (1, 2)}
            own |= {"nats_layer.weight": (2 * routes, width), "nats_out_weights_layer.weight": (2 * softmax, keys)}
            own |= {f"{x}_norm.weight": (keys // softmax,) for x in "qk"} if c["attn_qk_norm"] else {}
        return own

    def mixed(self, x: Tensor, w: dict[str, Tensor], layer: int, seen: States) -> Tensor:
        c, heads, softmax = self.config, self.config["num_heads"], self.config["num_attn_heads"]
        flat = torch.cat([x @ w[f"{n}_proj.weight"].T for n in "qkv"], -1)
        wide = pad(flat, (0, 0, c["conv_size"] - 1, 0)).transpose(1, 2)
        seen.conv[layer] = wide[..., wide.shape[-1] - c["conv_size"] + 1 :]
        taps = torch.cat([w[f"{n}_conv1d.weight"] for n in "qkv"])
        keys = heads * c["head_dim"]
        q, k, v = (
            silu(conv1d(wide, taps, groups=len(taps)))
            .transpose(1, 2)
            .split((keys, keys, flat.shape[-1] - 2 * keys), -1)
        )
        rows = [y.unflatten(-1, (heads, -1)) for y in (q, k, v)]
        rows[:2] = [y / ((y * y).sum(-1, keepdim=True) + 1e-6).sqrt() for y in rows[:2]]
        decay = -w["A_log"].exp() * softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
        beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if c["allow_neg_eigval"] else 1)
        gate = x @ w["g_proj.weight"].T
        if layer in c["gdn_layers"]:
            went = torch.zeros(len(x), 0, heads, dtype=torch.bool)
            found, seen.recurrent[layer] = self.rule(rows, decay, beta, went)
            found = self.norm(found, w["o_norm.weight"]).flatten(2)
            return found * silu(gate) @ w["o_proj.weight"].T
        means = torch.stack([part.mean(1) for part in x.split(64, 1)], 1) @ w["nats_layer.weight"].T
        first, second = means.unflatten(-1, (-1, 2)).unbind(-1)
        tokens, whole = x.shape[1], x.shape[1] // 64
        last = x[:, tokens // 64 * 64 :] @ w["nats_layer.weight"].T
        told = (last[..., 0::2] - last[..., 1::2]).sum(1) if tokens % 64 else 64 * (first - second)[:, -1]
        seen.recurrent[layer] = told[..., None, None]  # of the open chunk, or of the one that was closed last
        went = self.choose((first >= second)[:, :whole], (first - second)[:, :whole].abs())  # [B, chunks, R]
        linear, _ = self.rule(rows, decay, beta, went.repeat_interleave(heads // went.shape[-1], -1))

        q, k, v = (y.unflatten(-1, (softmax, -1)) for y in (q, k, v))
        shares = (rows_of(q) @ w["nats_out_weights_layer.weight"].T).unflatten(-1, (softmax, 2)).softmax(-1)
        if c["attn_qk_norm"]:
            q, k = self.norm(q, w["q_norm.weight"]), self.norm(k, w["k_norm.weight"])
        place = torch.arange(tokens)
        chunk = place // 64
        open_ = torch.cat((went, went.new_zeros(len(x), 1, went.shape[-1])), 1)[:, chunk]  # [B, S, R]
        mask = open_.transpose(1, 2)[:, :, None] | (chunk == chunk[:, None])
        mask = (mask & (place <= place[:, None])).repeat_interleave(softmax // went.shape[-1], 1)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        output = torch.einsum("bhts,bshd->bthd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
        parts = linear.flatten(2).unflatten(-1, (softmax, -1)), output
        total = sum(self.norm(y, w[f"o_norm.weight{n + 1}"]) * shares[..., n, None] for n, y in enumerate(parts))
        return (rows_of(total) * silu(gate)) @ w["o_proj.weight"].T  # type: ignore[arg-type]

    def rule(self, rows: list[Tensor], decay: Tensor, beta: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, H, V], and the state; `back` [B, chunks, H] are chunks that are taken back."""
        kind = torch.promote_types(rows[0].dtype, torch.float32)  # as published kernels do
        (q, k, v), decay, beta = (y.to(kind) for y in rows), decay.to(kind), beta.to(kind)
        state = start = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
        outputs = []
        for t in range(q.shape[1]):
            left = decay[:, t, :, None, None].exp()
            state, start = left * state, left * start if self.config["decay_for_non_gdn_blocks"] else start
            new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / q.shape[3] ** 0.5)
            if t % 64 == 63:
                taken = back[:, t // 64, :, None, None] if back.shape[1] else torch.zeros(())
                state = start = torch.where(taken > 0, start, state)
        return torch.stack(outputs, 1).to(rows[0].dtype), state

    def told_ids(self, tokens: int) -> list[Tensor]:
        """At the last tokens of chunks."""
        found = []
        for went in self.told or []:
            routes = went.shape[-1]
            ids = torch.full((len(went), tokens, routes), -1)
            ids[:, 63::64] = torch.arange(routes) + torch.where(went, 0, routes)
            found.append(ids)
        return found


class LlamaLike(RoutedModel):
    """Llama's layers around another attention."""

    sizes: ClassVar[dict[str, Any]] = dict(
        **LLAMA,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
    )
    place: ClassVar[str]

    def own_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def attended(self, h: Tensor, w: dict[str, Tensor], turn: Tensor) -> Tensor:
        """Heads' outputs, without the last projection."""
        raise NotImplementedError

    def layer_shapes(self, i: int) -> Shapes:
        width = self.config["hidden_size"]
        own = {f"{self.place}.{name}": shape for name, shape in self.own_shapes(width).items()}
        own |= {f"{self.place}.{x}_proj.weight": (width, width) for x in "qo"}
        return own | mlp_shapes(self.config)

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x = self.config, self.embedded(ids)
        dim = c["hidden_size"] // c["num_attention_heads"]
        turn = turns(torch.arange(ids.shape[1]), dim, c["rope_parameters"]["rope_theta"])
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            own = {n.removeprefix(f"{self.place}."): t for n, t in w.items() if n.startswith(f"{self.place}.")}
            rows = self.attended(rms(x, w["input_layernorm.weight"]), own, turn)
            x = x + rows.flatten(2) @ own["o_proj.weight"].T
            x = x + mlp(x, w)
        return self.read_out(x)


class LandmarkModel(LlamaLike):
    """Landmark attention, as two softmaxes; with `cache_top_k` some blocks are read."""

    place = "self_attn"
    sizes: ClassVar[dict[str, Any]] = {**LlamaLike.sizes, "mem_id": 60, "mem_freq": 12}

    def own_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        keys = width // self.config["num_attention_heads"] * self.config["num_key_value_heads"]
        return {f"{x}_proj.weight": (keys, width) for x in "kv"}

    def attended(self, h: Tensor, w: dict[str, Tensor], turn: Tensor) -> Tensor:
        c, size = self.config, self.config["mem_freq"] + 1
        dim = c["hidden_size"] // c["num_attention_heads"]
        q, k, v = ((h @ w[f"{n}_proj.weight"].T).unflatten(-1, (-1, dim)) for n in "qkv")
        if top := c.get("cache_top_k"):
            every = [dict(zip(("query", "key", "value"), row, strict=True)) for row in zip(q, k, v, strict=True)]
            return torch.stack([retrieved(x, size, top, c["rope_parameters"]["rope_theta"]) for x in every])
        q, k = turned(q, turn), turned(k, turn)
        k, v = (y.repeat_interleave(q.shape[2] // k.shape[2], 2) for y in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / dim**0.5
        rows = []
        for t in range(h.shape[1]):
            block = t // size
            own = [s for s in range(block * size, t + 1) if s % size < size - 1]
            marks = [b * size + size - 1 for b in range(block)]
            shares = scores[:, :, t, own + marks].softmax(-1)
            row = torch.einsum("bhs,bshd->bhd", shares[..., : len(own)], v[:, own])
            for b in range(block):
                inside = slice(b * size, b * size + size - 1)
                weights = scores[:, :, t, inside].softmax(-1) * shares[..., len(own) + b, None]
                row = row + torch.einsum("bhs,bshd->bhd", weights, v[:, inside])
            rows.append(row)
        return torch.stack(rows, 1)


class RoutingModel(LlamaLike):
    """Routing Transformer in our causal reading."""

    place = "attn"
    sizes: ClassVar[dict[str, Any]] = {**LlamaLike.sizes, "num_key_value_heads": 4, "num_clusters": 5, "window_size": 9}

    def own_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        heads = self.config["num_attention_heads"]
        return {"v_proj.weight": (width, width), "means": (heads, self.config["num_clusters"], width // heads)}

    def attended(self, h: Tensor, w: dict[str, Tensor], turn: Tensor) -> Tensor:
        heads, window = self.config["num_attention_heads"], self.config["window_size"]
        q, v = ((h @ w[f"{n}_proj.weight"].T).unflatten(-1, (heads, -1)) for n in "qv")
        asked, q = q, turned(q, turn)
        asked, k = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (asked, q))
        near = torch.einsum("bthd,hcd->bthc", asked, w["means"])
        best = near.topk(2).values
        cluster = self.choose(near.argmax(-1), best[..., 0] - best[..., 1])  # [B, T, H]
        place = torch.arange(h.shape[1])
        same = (cluster[:, :, None] == cluster[:, None]) & (place < place[:, None])[:, :, None]  # [B, T, S, H]
        later = same.flip(2).cumsum(2).flip(2)  # how many of them from each on
        mask = same & (later <= window)
        own = torch.eye(len(place), dtype=torch.bool)[:, :, None]
        mask = (mask | (own & ~mask.any(2, keepdim=True))).permute(0, 3, 1, 2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[3] ** 0.5
        return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    def told_ids(self, tokens: int) -> list[Tensor]:
        """Numbered head after head."""
        return [went + torch.arange(went.shape[-1]) * self.config["num_clusters"] for went in self.told or []]


def rows_of(x: Tensor) -> Tensor:
    return x.flatten(2)


ROUTED: dict[str, type[OwnModel]] = {
    "neural_attention_search_linear_attn_gdn": NatsModel,
    "llama_with_landmark": LandmarkModel,
    "routing_transformer": RoutingModel,
}
"""By model_type."""
