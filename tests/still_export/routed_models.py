"""Random models whose tokens go where they are told: NAtS-L. Its formulas, one token after the other, under its published names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

from tests.still_export.fla_models import States
from tests.still_export.own_models import OwnModel


class NatsModel(OwnModel):
    """NAtS-L beside a layer that is a plain gated delta rule. `gaps` are, of all decisions, how clear each was; `fault` is what tests plant:
    "kept", no chunk is taken back from the rule; "early", chunks go where the one before was told to."""

    fault = ""
    sizes: ClassVar[dict[str, Any]] = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=3,
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
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, width = self.config, self.config["hidden_size"]
        heads, softmax, routes = c["num_heads"], c["num_attn_heads"], c["num_nats_head"] or c["num_heads"]
        keys, values = heads * c["head_dim"], int(heads * c["head_dim"] * c["expand_v"])
        embeddings = (c["vocab_size"], width)
        found: dict[str, tuple[int, ...]] = {"model.embeddings.weight": embeddings, "lm_head.weight": embeddings}
        found["model.norm.weight"] = (width,)
        for i in range(c["num_hidden_layers"]):
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
            own = {f"attn.{name}": shape for name, shape in own.items()}
            own |= {"attn_norm.weight": (width,), "mlp_norm.weight": (width,)}
            own |= {f"mlp.{x}_proj.weight": (c["intermediate_size"], width) for x in ("gate", "up")}
            own["mlp.down_proj.weight"] = (width, c["intermediate_size"])
            found |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
        return found

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + self.config["norm_eps"]).sqrt() * weight

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        c, x = self.config, self.tensors["model.embeddings.weight"][ids]
        self.gaps: list[Tensor] = []
        for i in range(c["num_hidden_layers"]):
            w = self.layer(i)
            own = {name.removeprefix("attn."): t for name, t in w.items() if name.startswith("attn.")}
            x = x + self.mixed(self.norm(x, w["attn_norm.weight"]), own, i, seen)
            h = self.norm(x, w["mlp_norm.weight"])
            inner = silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
            x = x + inner @ w["mlp.down_proj.weight"].T
        return self.norm(x, self.tensors["model.norm.weight"]) @ self.tensors["lm_head.weight"].T

    def mixed(self, x: Tensor, w: dict[str, Tensor], layer: int, seen: States) -> Tensor:
        c, heads, softmax = self.config, self.config["num_heads"], self.config["num_attn_heads"]
        flat = torch.cat([x @ w[f"{n}_proj.weight"].T for n in "qkv"], -1)
        wide = pad(flat, (0, 0, c["conv_size"] - 1, 0)).transpose(1, 2)
        seen.conv[layer] = wide[..., wide.shape[-1] - c["conv_size"] + 1 :]
        taps = torch.cat([w[f"{n}_conv1d.weight"] for n in "qkv"])
        keys = heads * c["head_dim"]
        q, k, v = silu(conv1d(wide, taps, groups=len(taps))).transpose(1, 2).split((keys, keys, flat.shape[-1] - 2 * keys), -1)
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
        self.gaps.append((first - second)[:, :whole].abs())
        went = (first >= second)[:, :whole]  # [B, chunks, R]
        went = torch.cat((torch.zeros_like(went[:, :1]), went[:, :-1]), 1) if self.fault == "early" else went
        back = torch.zeros_like(went) if self.fault == "kept" else went
        linear, _ = self.rule(rows, decay, beta, back.repeat_interleave(heads // went.shape[-1], -1))

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
        total = sum(
            self.norm(y, w[f"o_norm.weight{n + 1}"]) * shares[..., n, None] for n, y in enumerate(parts)
        )
        return (rows_of(total) * silu(gate)) @ w["o_proj.weight"].T  # type: ignore[arg-type]

    def rule(self, rows: list[Tensor], decay: Tensor, beta: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, H, V], and the state; `back` [B, chunks, H] are chunks that are taken back."""
        q, k, v = rows
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
        return torch.stack(outputs, 1), state


def rows_of(x: Tensor) -> Tensor:
    return x.flatten(2)


ROUTED: dict[str, type[OwnModel]] = {"neural_attention_search_linear_attn_gdn": NatsModel}
"""By model_type."""
