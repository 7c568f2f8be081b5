"""Runs the plan of still::DenseMatMul with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.dense_matmul.inputs import Inputs
from still_kernels.dense_matmul.triton_products import few_kernel, many_kernel, norm_kernel
from still_kernels.dense_matmul.variants import KERNELS, build
from still_kernels.plan import Call
from still_kernels.tile import TileTable

FUNCTIONS = {"norm": norm_kernel, "few": few_kernel, "many": many_kernel}


def _prepare(
    arch: int,
    table: TileTable | None,
    sizes: tuple[tuple[str, int], ...],
    present: frozenset[str],
    dtype: torch.dtype,
    epsilon: float,
) -> launcher.Prepared:
    """The launches of a kind of call.

    Args:
        table: Block sizes; None: those of the architecture.
        sizes: By symbol.
        present: Optional inputs that are given.
    """
    seen = Call(dict(sizes), {"norm_epsilon": epsilon}, dtype=str(dtype).removeprefix("torch."), present=present)
    own = arch if table is None else None
    return launcher.prepare_call(KERNELS, seen, partial(build, arch=arch, table=table), own)


@lru_cache(1024)
def _prepared(device: torch.device, *call: Any) -> launcher.Prepared:
    """The same with the block sizes of the device; kept, for a layer is called once per token."""
    return _prepare(launcher.arch_of(device), None, *call)


def launch_dense_matmul(inputs: Inputs, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels.

    Args:
        inputs: Contiguous.
        output: [B, T, O], of the type of the tokens.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    batch, tokens, width = inputs.input.shape
    sizes = (("B", batch), ("T", tokens), ("I", width), ("O", inputs.outputs))
    tensors = {name: x for name, x in vars(inputs).items() if x is None or isinstance(x, Tensor)}
    present = frozenset(name for name, x in tensors.items() if x is not None and name != "input")
    call = (sizes, present, inputs.input.dtype, inputs.epsilon)
    if table is None:
        prepared = _prepared(inputs.input.device, *call)
    else:
        prepared = _prepare(launcher.arch_of(inputs.input.device), table, *call)
    launcher.Launcher().run(prepared, {**tensors, "output": output}, inputs.input)


def triton_dense_matmul(inputs: Inputs) -> Tensor:
    """`naive_dense_matmul` by the kernels, on CUDA; results and errors alike."""
    inputs.check()
    if inputs.input.device.type != "cuda":
        raise UnsupportedError(f"device {inputs.input.device.type!r} has no kernel; known: cuda.")
    given = {name: x.contiguous() for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    output = inputs.input.new_empty(*inputs.input.shape[:2], inputs.outputs)
    launch_dense_matmul(replace(inputs, **given), output)  # type: ignore[arg-type]
    return output
