"""Random models of flash-linear-attention, which needs a GPU: its formulas, one token after the other, under its names."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus

from tests.still_export.own_models import Draw, OwnModel, Shapes, States, gated, mlp_shapes, turned, turns

COMMON: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=44,
    num_hidden_layers=3,
    hidden_act="swish",
    norm_eps=1e-6,
    hidden_ratio=4,
    fuse_norm=True,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=None,  # random models must not stop by chance
    pad_token_id=None,
    attn=None,
)
SOFTMAX = dict(layers=[1], num_heads=4, num_kv_heads=2, qkv_bias=True, window_size=None, rope_theta=1000.0)
SIZES: dict[str, dict[str, Any]] = {
    "gated_deltanet": dict(
        num_heads=2, num_v_heads=4, head_dim=25, expand_v=0.8, use_gate=True, use_short_conv=True, conv_size=4
    ),
    "delta_net": dict(
        num_heads=2, expand_k=2.0, expand_v=1.5, use_gate=False, use_beta=True, use_short_conv=True, conv_size=3
    ),
    "gla": dict(num_heads=4, num_kv_heads=2, expand_k=2.0, expand_v=1.5, use_short_conv=False, attn=SOFTMAX),
    "hgrn2": dict(num_heads=None, expand_ratio=8, use_lower_bound=True, use_short_conv=False),
    "hgrn": dict(expand_ratio=1, use_lower_bound=True, use_short_conv=False),
    "retnet": dict(num_heads=3, expand_k=1.0, expand_v=2.0, use_short_conv=False),
    "parallax": dict(num_heads=4, num_kv_heads=2, qkv_bias=True, qk_norm=True, window_size=None, rope_theta=1000.0),
    "local_linear": dict(num_heads=4, num_kv_heads=2, rope_theta=1000.0, ridge=3.0),
}
"""What each family's configuration has beside `COMMON`."""


KEYED = ("parallax", "local_linear")
"""Whose layers keep keys and values."""


class FlaLayers(OwnModel):
    """Whose layers are mixer and MLP under names of flash-linear-attention."""

    names = ("model.embeddings", "lm_head", "model.norm", "model.layers")

    def layer_shapes(self, i: int) -> Shapes:
        own = {f"attn.{name}": shape for name, shape in self.mixer_shapes(i).items()}
        return {**own, **mlp_shapes(self.config, "attn_norm", "mlp_norm")}

    def mixer_shapes(self, i: int) -> Shapes:
        raise NotImplementedError

    def mixed(self, x: Tensor, w: dict[str, Tensor], layer: int, seen: States) -> Tensor:
        raise NotImplementedError

    def logits(self, ids: Tensor, seen: States) -> Tensor:
        x = self.embedded(ids)
        for i in range(self.config["num_hidden_layers"]):
            w = self.layer(i)
            own = {n.removeprefix("attn."): t for n, t in w.items() if n.startswith("attn.")}
            x = x + self.mixed(self.norm(x, w["attn_norm.weight"]), own, i, seen)
            x = x + gated(self.norm(x, w["mlp_norm.weight"]), w)
        return self.norm(x, self.tensors["model.norm.weight"]) @ self.tensors["lm_head.weight"].T

    def norm(self, x: Tensor, weight: Tensor, epsilon: float | None = None) -> Tensor:
        epsilon = self.config["norm_eps"] if epsilon is None else epsilon
        return x / ((x * x).mean(-1, keepdim=True) + epsilon).sqrt() * weight


class FlaModel(FlaLayers):
    def __init__(self, family: str, draw: Draw, **changes: Any) -> None:
        self.family, self.sizes = family, {**COMMON, **SIZES[family]}  # type: ignore[misc]
        super().__init__(family, draw, **changes)

    def shapes(self) -> Shapes:
        c = self.config
        bounds = (c["num_hidden_layers"], c["hidden_size"])
        return super().shapes() | ({"model.lower_bounds": bounds} if c.get("use_lower_bound") else {})

    def _is_softmax(self, i: int) -> bool:
        return bool(self.config["attn"]) and i in self.config["attn"]["layers"]

    def mixer_shapes(self, i: int) -> Shapes:
        return self._softmax_shapes() if self._is_softmax(i) else self._mixer_shapes()

    def mixed(self, x: Tensor, w: dict[str, Tensor], layer: int, seen: States) -> Tensor:
        return self._softmax(x, w) if self._is_softmax(layer) else self._mixer(x, w, layer, seen)

    def _softmax_shapes(self) -> Shapes:
        hidden, attn = self.config["hidden_size"], self.config["attn"]
        keys = hidden // attn["num_heads"] * attn["num_kv_heads"]
        outputs = {"q": hidden, "k": keys, "v": keys, "o": hidden}
        shapes: Shapes = {f"{x}_proj.weight": (n, hidden) for x, n in outputs.items()}
        return shapes | {f"{x}_proj.bias": (outputs[x],) for x in "qkv"}

    @property
    def heads(self) -> tuple[int, int, int, int, int]:
        """Heads of queries, keys and values, D, V."""
        c = self.config
        hidden = c["hidden_size"]
        if self.family == "gated_deltanet":
            return (
                c["num_heads"],
                c["num_heads"],
                c["num_v_heads"] or c["num_heads"],
                c["head_dim"],
                int(c["head_dim"] * c["expand_v"]),
            )
        if self.family == "hgrn":
            return 0, hidden * c["expand_ratio"], hidden * c["expand_ratio"], 1, 1
        if self.family == "hgrn2":
            heads = hidden // c["expand_ratio"]
            return heads, heads, heads, c["expand_ratio"], hidden // heads
        heads, dim, size = c["num_heads"], *(int(hidden * c[x] / c["num_heads"]) for x in ("expand_k", "expand_v"))
        kept = c.get("num_kv_heads") or heads
        return heads, kept, kept, dim, size

    def _mixer_shapes(self) -> Shapes:
        c, hidden = self.config, self.config["hidden_size"]
        if self.family in KEYED:
            return self._keyed_shapes()
        queries, keys, values, dim, size = self.heads
        names = "qfi" if self.family.startswith("hgrn") else "qkv"
        channels = dict(zip(names, (queries * dim, keys * dim, values * size), strict=True))
        outputs = size * max(queries, values)
        channels = {x: n for x, n in channels.items() if n}
        shapes: Shapes = {f"{x}_proj.weight": (n, hidden) for x, n in channels.items()}
        shapes["o_proj.weight"] = (hidden, outputs)
        if c["use_short_conv"]:
            shapes |= {f"{x}_conv1d.weight": (n, 1, c["conv_size"]) for x, n in channels.items()}
        gated = self.family in ("gla", "retnet") and c.get("use_output_gate", True)
        if c.get("use_gate") or self.family == "hgrn" or gated:
            shapes["g_proj.weight"] = (outputs, hidden)
        if self.family == "gla":
            norm = "g_norm_swish_gate" if "g_proj.weight" in shapes else "g_norm"
            shapes |= {
                "gk_proj.0.weight": (16, hidden),
                "gk_proj.1.weight": (keys * dim, 16),
                "gk_proj.1.bias": (keys * dim,),
            }
            return shapes | {f"{norm}.weight": (size,)}
        if self.family.startswith("hgrn"):
            return shapes | {"g_norm.weight": (outputs,)}
        if self.family == "retnet":
            return shapes | {"g_norm_swish_gate.weight" if gated else "g_norm.weight": (size,)}
        shapes |= {"b_proj.weight": (values, hidden), "o_norm.weight": (size,)}
        if self.family == "gated_deltanet":
            shapes |= {"a_proj.weight": (values, hidden), "A_log": (values,), "dt_bias": (values,)}
        return shapes

    def _keyed_shapes(self) -> Shapes:
        c, hidden = self.config, self.config["hidden_size"]
        dim, keys = hidden // c["num_heads"], hidden // c["num_heads"] * (c["num_kv_heads"] or c["num_heads"])
        outputs = {"q": hidden, "k": keys, "v": keys, "o": hidden}
        outputs |= {"r": hidden} if self.family == "parallax" else {}
        shapes: Shapes = {f"{x}_proj.weight": (n, hidden) for x, n in outputs.items()}
        shapes |= {f"{x}_proj.bias": (n,) for x, n in outputs.items() if c.get("qkv_bias") and x != "o"}
        return shapes | ({f"{x}_norm.weight": (dim,) for x in "qrk"} if c.get("qk_norm") else {})

    def _keyed(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """Parallax, and local linear attention by its normal equations with a constant term."""
        c = self.config
        dim, group = x.shape[-1] // c["num_heads"], c["num_heads"] // (c["num_kv_heads"] or c["num_heads"])
        turn = turns(torch.arange(x.shape[1]), dim, c["rope_theta"])

        def heads(name: str) -> Tensor:
            rows = (x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0.0)).unflatten(-1, (-1, dim))
            rows = self.norm(rows, w[f"{name}_norm.weight"], 1e-5) if f"{name}_norm.weight" in w else rows
            return turned(rows, turn) if name != "v" else rows

        q, k, v = (heads(name) for name in "qkv")
        k, v = (h.repeat_interleave(group, 2) for h in (k, v))
        scores = (torch.einsum("bthd,bshd->bhts", q, k) / dim**0.5).exp().tril()
        if self.family == "parallax":
            across = scores * torch.einsum("bthd,bshd->bhts", heads("r"), k)
            total = scores.sum(-1, keepdim=True)
            output = scores @ v.transpose(1, 2) / total * (1 + across.sum(-1, keepdim=True) / total)
            output = (output - across @ v.transpose(1, 2) / total).transpose(1, 2)
        else:
            rows = []
            for t in range(x.shape[1]):
                # Normal equations in float64 in any case: in float32 they lose more than the model does.
                apart = (k[:, : t + 1] - q[:, t : t + 1]).transpose(1, 2).double()  # [B, H, t + 1, D]
                design = torch.cat((torch.ones_like(apart[..., :1]), apart), -1)
                weighted = (design * scores[:, :, t, : t + 1, None]).transpose(2, 3)
                penalty = c["ridge"] * torch.eye(dim + 1, dtype=torch.float64)
                penalty[0, 0] = 0
                values = v[:, : t + 1].transpose(1, 2).double()
                rows.append(torch.linalg.solve(weighted @ design + penalty, weighted @ values)[:, :, 0])
            output = torch.stack(rows, 1).to(x.dtype)
        return output.flatten(2) @ w["o_proj.weight"].T

    def _softmax(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        attn = self.config["attn"]
        dim, tokens = x.shape[-1] // attn["num_heads"], x.shape[1]
        q, k, v = ((x @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"]).unflatten(-1, (-1, dim)) for n in "qkv")
        turn = turns(torch.arange(tokens), dim, attn["rope_theta"])
        q, k = (turned(h, turn) for h in (q, k))
        k, v = (h.repeat_interleave(attn["num_heads"] // attn["num_kv_heads"], 2) for h in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / dim**0.5
        behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
        seen = (behind >= 0) & (behind < (attn["window_size"] or tokens))
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2) @ w["o_proj.weight"].T

    def _mixer(self, x: Tensor, w: dict[str, Tensor], layer: int, seen: States) -> Tensor:
        c = self.config
        if self.family in KEYED:
            return self._keyed(x, w)
        queries, keys, values, dim, size = self.heads
        names = "fi" if self.family == "hgrn" else "qfi" if self.family == "hgrn2" else "qkv"
        *read, k, v = (x @ w[f"{n}_proj.weight"].T for n in names)
        q = read[0] if read else x[..., :0]
        if c["use_short_conv"]:
            taps = c["conv_size"]
            wide = torch.nn.functional.pad(torch.cat([q, k, v], -1), (0, 0, taps - 1, 0)).transpose(1, 2)
            seen.conv[layer] = wide[..., wide.shape[-1] - taps + 1 :]
            kernel = torch.cat([w[f"{n}_conv1d.weight"] for n in names])
            wide = torch.nn.functional.conv1d(wide, kernel, groups=kernel.shape[0]).transpose(1, 2)
            wide = wide if self.family.startswith("hgrn") else silu(wide)
            q, k, v = wide.split((q.shape[-1], k.shape[-1], v.shape[-1]), -1)
        decay = beta = None
        if self.family.startswith("hgrn"):
            decay = logsigmoid(k)
            if c["use_lower_bound"] and layer:
                shares = self.tensors["model.lower_bounds"].softmax(0)
                bound = (shares.cumsum(0) - shares[0])[layer]
                decay = torch.logaddexp(bound.log(), (1 - bound).log() + decay)
            q, k = silu(q), 1 - decay.exp()
            if self.family == "hgrn":  # h := f h + (1 - f) silu(i)
                q, k, v = torch.ones_like(v), torch.ones_like(v), silu(v) * k
        elif self.family == "retnet":
            kept = 1 - 2.0 ** (-5 - torch.arange(queries).double())
            decay = kept.log()[:, None].expand(*x.shape[:2], queries, dim).flatten(2).to(x.dtype)
            turn = turns(torch.arange(x.shape[1]), dim, 1e4)
            q, k = (turned(h.unflatten(-1, (-1, dim)), turn).flatten(2) for h in (q, k))
        elif self.family == "gla":
            decay = logsigmoid(x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]) / 16
            decay = decay if c.get("clamp_min") is None else decay.clamp_min(c["clamp_min"])
        if self.family in ("delta_net", "gated_deltanet"):
            beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if c.get("allow_neg_eigval") else 1)
        q, k, v = q.unflatten(-1, (-1, dim)), k.unflatten(-1, (keys, dim)), v.unflatten(-1, (values, size))
        if decay is not None:
            decay = decay.unflatten(-1, (keys, dim))
        if beta is not None:
            q, k = (h / ((h * h).sum(-1, keepdim=True) + 1e-6).sqrt() for h in (q, k))
        if self.family == "gated_deltanet":
            decay = -w["A_log"].exp() * softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
            decay = decay[..., None]
        output, seen.recurrent[layer] = _recurrence(q, k, v, decay, beta)
        if self.family == "hgrn2":
            return self.norm(output.flatten(2), w["g_norm.weight"], 1e-5) @ w["o_proj.weight"].T
        if self.family == "hgrn":
            return (self.norm(output.flatten(2), w["g_norm.weight"]) * silu(x @ w["g_proj.weight"].T)) @ w[
                "o_proj.weight"
            ].T
        norm = next(t for n, t in w.items() if "norm" in n)
        output = self.norm(output, norm).flatten(2)
        if "g_proj.weight" in w:
            gate = x @ w["g_proj.weight"].T
            output = output * (gate.sigmoid() if c.get("output_gate_activation") == "sigmoid" else silu(gate))
        return output @ w["o_proj.weight"].T


def _recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, heads, V] and the last states of as many heads as keys or values have, whichever are more."""
    heads, read = max(k.shape[2], v.shape[2]), max(q.shape[2], v.shape[2])
    k, v = (h.repeat_interleave(heads // h.shape[2], 2) for h in (k, v))
    q = q.repeat_interleave(read // q.shape[2], 2) / q.shape[-1] ** 0.5
    state, outputs = q.new_zeros(q.shape[0], heads, k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        if decay is not None:
            state = state * decay[:, t, :, :, None].exp()
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state.repeat_interleave(read // heads, 1)))
    return torch.stack(outputs, 1), state
