"""Calls of still::Experts for bench and tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from still_kernels.experts.meaning import Inputs, naive_experts
from still_kernels.tile import Setting
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one, stages

_BLOCK_MOVES: list[Setting] = [
    *one("BN", 64, 128, 256),
    *one("BK", 32, 64, 128),
    *stages(2, 3, 4),
    *one("num_warps", 4, 8),
]
_FEW_MOVES = [*one("BN", 4, 8, 16, 32), *one("BK", 128, 256, 512, 1024), *stages(2, 3, 4), *one("num_warps", 2, 4, 8)]
_CODES_MOVES: list[Setting] = [
    *one("BN", 16, 32),
    *one("UNITS", 1, 2, 4),
    {"SPLITS": 4, "num_warps": 4},
    {"SPLITS": 8, "num_warps": 8},
    {"SPLITS": 16, "num_warps": 16},
]


def moves_of(codes: bool) -> dict[str, Any]:
    """Arguments of `Calls`: what tune tries, and which of it belongs to a step."""
    kind, few = ("few_codes", _CODES_MOVES) if codes else ("few", _FEW_MOVES)
    steps = {f"{kind}_{name}": few for name in ("gate_up", "down")}
    blocks = {f"{kind}_{name}": _BLOCK_MOVES for kind in ("some", "many") for name in ("gate_up", "down")}
    return {"moves": {**steps, **blocks}, "decode": frozenset(steps)}


SIZES = {"heads": 16, "experts": 256, "chosen": 8}
"""Of Qwen3.5-35B-A3B, whose hidden size is 2,048."""


def plain(inputs: Any) -> Tensor:
    """By PyTorch's operators; of a few tokens without a look at who goes where, as CUDA graphs want it."""
    if inputs.input[..., 0].numel() > 16 or inputs.activation != "swiglu":
        return naive_experts(inputs)
    from torch.nn.functional import silu

    chosen = inputs.expert.flatten(0, 1).long()
    inner = (inputs.gate_up[chosen] @ inputs.input.flatten(0, 1)[:, None, :, None])[..., 0]
    parts = inputs.down[chosen] @ (silu(inner[..., ::2]) * inner[..., 1::2])[..., None]
    return (
        (parts[..., 0] * inputs.weight.flatten(0, 1)[..., None]).sum(1).to(inputs.input.dtype).view(inputs.input.shape)
    )


def _in_vllm(inputs: Inputs) -> Callable[[], Tensor]:
    """By vLLM's fused_experts, whose gate and up projections lie one behind the other."""
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    gate_up = torch.cat([inputs.gate_up[:, ::2], inputs.gate_up[:, 1::2]], 1)
    tokens, weight, expert = (x.flatten(0, 1) for x in (inputs.input, inputs.weight, inputs.expert))
    return lambda: fused_experts(tokens, gate_up, inputs.down, weight, expert).view(inputs.input.shape)  # type: ignore[no-any-return]


def others() -> dict[str, Callable[[Any], Callable[[], Tensor]]]:
    """vLLM, where it is installed."""
    return {"vLLM's fused_experts": _in_vllm} if find_spec("vllm") else {}


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    hidden, many, chosen = sizes["heads"] * sizes["head_dim"], sizes["experts"], sizes["chosen"]
    inner = -(-hidden // 128) * 32  # 512 of 2,048
    tokens, expert, weight = draw.tokens(hidden), draw.chosen(many, chosen), draw.shares(chosen)
    stacks = draw.stack(many, 2 * inner, hidden), draw.stack(many, hidden, inner)
    return Inputs(tokens, expert, weight, *stacks)


def unread(inputs: Any) -> int:
    """Bytes of the experts that no token goes to; the more of a call's tokens go to one, the fewer are read."""
    stacks = [x for name, x in vars(inputs).items() if name.startswith(("gate_up", "down")) and x is not None]
    read = inputs.expert.unique().numel() if inputs.expert.device.type != "meta" else inputs.expert.shape[-1]
    many: int = len(inputs.down)
    return sum(x.nbytes for x in stacks) * (many - read) // many


def flop(inputs: Any) -> float:
    """Multiplications and additions of all pairs of token and expert."""
    _, rows, _ = inputs.gate_up.shape
    inner = rows // 2 if inputs.activation == "swiglu" else rows
    return 2.0 * inputs.expert.numel() * inputs.input.shape[-1] * (rows + inner)


CALLS = Calls(
    draw=_draw,
    flop=flop,
    **moves_of(codes=False),
    sizes=SIZES,
    plain=plain,
    unread=unread,
    others=others,
)
