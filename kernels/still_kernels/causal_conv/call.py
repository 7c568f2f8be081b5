"""Calls of still::CausalConv: choice of implementation, and launch of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.causal_conv.meaning import Inputs, whole_causal_conv
from still_kernels.causal_conv.plan import KERNELS
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.forms import has_kernels
from still_kernels.sizes import tensors_of
from still_kernels.tile import TileTable
from still_kernels.torch_ops import traced_op

_prepared = launcher.cached_launches(KERNELS)


def launch_causal_conv(inputs: Inputs, state: Tensor, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels on `state` [B, C, K - 1], in place.

    Args:
        inputs: Contiguous, with `new_tokens`.
        output: Like input.
    """
    tokens_of = inputs.input
    taps = inputs.weight.shape[2]
    sizes = (*zip("BTC", tokens_of.shape, strict=True), ("K", taps), ("P", taps - 1))
    bias = () if inputs.bias is None else ("bias",)
    prepared = _prepared(tokens_of.device, table, tokens_of.dtype, sizes, (("activation", inputs.activation),), bias)
    tensors = {**tensors_of(inputs), "conv_state": state, "output": output}
    launcher.Launcher().run(prepared, tensors, tokens_of)


@traced_op(CAUSAL_CONV, Inputs)
def causal_conv(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The causal convolution by the fastest implementation that covers the call; results and errors: see `whole_causal_conv`.

    The Triton kernels run on CUDA and read nothing back to the host. PyTorch runs on CPUs and if gradients are required. A traced program
    has one node.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if not has_kernels(inputs.input.device) or inputs.needs_gradients():
        return whole_causal_conv(inputs, state, in_place)
    inputs.check(state)
    launcher.check_device(inputs.input)
    present = launcher.written(state, in_place)
    by_name = {name: x.contiguous() for name, x in tensors_of(inputs).items()}
    by_name |= {name: x.to(inputs.input.dtype) for name, x in by_name.items() if name in ("weight", "bias")}
    by_name["new_tokens"] = inputs.counts().contiguous()
    output = torch.empty_like(by_name["input"])
    launch_causal_conv(Inputs(**by_name, activation=inputs.activation), present, output)  # type: ignore[arg-type]
    return output, present
