"""TransNormer, MiniCPM-SALA and Mamba-3 by their formulas, one token after the other."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tests.still_export.own_models import (
    SAID,
    Draw,
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
from tests.still_kernels.block_attention.inputs import Layer, attended, chosen


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
        **SAID,
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
        max_position_embeddings=512,
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
