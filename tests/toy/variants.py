"""What the kernel of still::Decay is compiled for, and its launch from PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from still_kernels import launcher
from still_kernels.op_kernels import Build, OpKernels
from still_kernels.plan import Call
from tests.toy.plan import PLAN
from tests.toy.tiles import TILES

CONSTANTS = {"block": TILES["decay"].constants["BLOCK"]}


@dataclass(frozen=True)
class Variant:
    """Kernels for one pair of types."""

    dtype: str = "float16"
    count_dtype: str = "int64"


def functions() -> Mapping[str, Any]:
    """Triton's function."""
    from tests.toy.triton_decay import decay_kernel

    return {"decay": decay_kernel}


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=lambda: [Variant()],
    build=lambda variant, arch: Build(TILES, {}, CONSTANTS),
    functions=functions,
)


def launch_decay(value: Tensor, new_tokens: Tensor, total: Tensor, output: Tensor, decay: float) -> None:
    """Run the kernel on `total`, in place."""
    batch, tokens, heads, dim = value.shape
    sizes = {"B": batch, "T": tokens, "H": heads, "D": dim}
    call = Call(sizes, {"decay": decay}, CONSTANTS, dtype=str(value.dtype).removeprefix("torch."))
    PLAN.check(call)
    tensors = {"value": value, "new_tokens": new_tokens, "total": total, "output": output}
    prepared = launcher.prepare(PLAN.evaluate(call), functions(), TILES, {})
    launcher.Launcher().run(prepared, tensors, value)
