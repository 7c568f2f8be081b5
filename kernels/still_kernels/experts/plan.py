"""still::Experts: kernels; its definition is `meaning.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from still_kernels.common.grouped_plan import SIZES, GroupedVariant, grouped_op, grouped_plan, moves_of
from still_kernels.common.stateless import Calls
from still_kernels.experts.spec import EXPERTS
from still_kernels.op_kernels import HALVES, imported

if TYPE_CHECKING:
    from torch import Tensor

    from still_kernels.common.calls import Draw
    from still_kernels.experts.meaning import Inputs


PLAN = grouped_plan(EXPERTS, "M", {})


class Variant(GroupedVariant):
    """As of `GroupedVariant`."""


def _definition(inputs: Inputs) -> Tensor:
    return imported("still_kernels.experts.meaning", "naive_experts")()(inputs)  # type: ignore[no-any-return]


def plain(inputs: Any) -> Tensor:
    """By PyTorch's operators; of a few tokens without a look at who goes where, as CUDA graphs want it."""
    if inputs.input[..., 0].numel() > 16 or inputs.activation != "swiglu":
        return _definition(inputs)
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
    return imported("still_kernels.experts.meaning", "Inputs")()(tokens, expert, weight, *stacks)  # type: ignore[no-any-return]


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


OP = grouped_op(
    PLAN,
    Variant,
    [Variant(dtype) for dtype in HALVES],
    _definition,
    Calls(
        draw=_draw,
        flop=flop,
        **moves_of(codes=False),
        sizes=SIZES,
        plain=plain,
        unread=unread,
        others=others,
    ),
    covers="experts have",
)
