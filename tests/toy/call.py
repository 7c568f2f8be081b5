"""Calls of still::Decay from PyTorch by its Triton kernel."""

from __future__ import annotations

from torch import Tensor

from still_kernels import launcher
from still_kernels.plan import Call
from tests.toy.plan import CONSTANTS, KERNELS, PLAN, TILES


def launch_decay(value: Tensor, new_tokens: Tensor, total: Tensor, output: Tensor, decay: float) -> None:
    """Run the kernel on `total`, in place."""
    batch, tokens, heads, dim = value.shape
    sizes = {"B": batch, "T": tokens, "H": heads, "D": dim}
    call = Call(sizes, {"decay": decay}, CONSTANTS, dtype=str(value.dtype).removeprefix("torch."))
    PLAN.check(call)
    tensors = {"value": value, "new_tokens": new_tokens, "total": total, "output": output}
    prepared = launcher.prepare(PLAN.evaluate(call), KERNELS.functions(), TILES, {})
    launcher.Launcher().run(prepared, tensors, value)
