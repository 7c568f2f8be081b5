"""Runs the plan of still::GatedMlp with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.dense_matmul.triton_products import norm_kernel
from still_kernels.gated_mlp.inputs import Inputs
from still_kernels.gated_mlp.triton_gated import few_down_kernel, few_gated_kernel, many_down_kernel, many_gated_kernel
from still_kernels.gated_mlp.variants import KERNELS, build
from still_kernels.plan import Call
from still_kernels.tile import TileTable

FUNCTIONS = {
    "norm": norm_kernel,
    "few_gated": few_gated_kernel,
    "few_down": few_down_kernel,
    "many_gated": many_gated_kernel,
    "many_down": many_down_kernel,
}


def _prepare(
    arch: int, table: TileTable | None, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype, epsilon: float
) -> launcher.Prepared:
    """The launches of a kind of call; `sizes` by symbol, `table` None for block sizes of the architecture."""
    seen = Call(dict(sizes), {"norm_epsilon": epsilon}, dtype=str(dtype).removeprefix("torch."))
    own = arch if table is None else None
    return launcher.prepare_call(KERNELS, seen, partial(build, arch=arch, table=table), own)


@lru_cache(1024)
def _prepared(device: torch.device, *call: Any) -> launcher.Prepared:
    """The same with the block sizes of the device; kept, for a layer is called once per token."""
    return _prepare(launcher.arch_of(device), None, *call)


def launch_gated_mlp(inputs: Inputs, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels.

    Args:
        inputs: Contiguous.
        output: [B, T, I], of the type of the tokens.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    batch, tokens, width = inputs.input.shape
    sizes = (("B", batch), ("T", tokens), ("I", width), ("M", inputs.down.shape[0]))
    call = (sizes, inputs.input.dtype, inputs.epsilon)
    if table is None:
        prepared = _prepared(inputs.input.device, *call)
    else:
        prepared = _prepare(launcher.arch_of(inputs.input.device), table, *call)
    tensors = {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    launcher.Launcher().run(prepared, {**tensors, "output": output}, inputs.input)


def triton_gated_mlp(inputs: Inputs) -> Tensor:
    """`naive_gated_mlp` by the kernels, on CUDA; results and errors alike."""
    inputs.check()
    if inputs.input.device.type != "cuda":
        raise UnsupportedError(f"device {inputs.input.device.type!r} has no kernel; known: cuda.")
    given = {name: x.contiguous() for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    output = torch.empty_like(given["input"])
    launch_gated_mlp(replace(inputs, **given), output)  # type: ignore[arg-type]
    return output
