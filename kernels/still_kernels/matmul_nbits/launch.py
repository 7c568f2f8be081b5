"""Runs the plan of still::MatMulNBits with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.matmul_nbits.gluon_few import few_kernel
from still_kernels.matmul_nbits.inputs import Inputs
from still_kernels.matmul_nbits.triton_many import multiply_kernel, unpack_kernel
from still_kernels.matmul_nbits.variants import KERNELS, build
from still_kernels.plan import Call
from still_kernels.tile import TileTable

FUNCTIONS = {"few": few_kernel, "unpack": unpack_kernel, "multiply": multiply_kernel}


def _prepare(
    arch: int,
    table: TileTable | None,
    sizes: tuple[tuple[str, int], ...],
    present: frozenset[str],
    dtype: torch.dtype,
    bits: int,
    block: int,
) -> launcher.Prepared:
    """The launches of a kind of call.

    Args:
        table: Block sizes; None: those of the architecture.
        sizes: By symbol; IZ where there are zero points.
        present: Optional inputs that are given.
    """
    seen = Call(
        dict(sizes),
        {"bits": bits, "block_size": block},
        dtype=str(dtype).removeprefix("torch."),
        present=present,
    )
    own = arch if table is None else None
    return launcher.prepare_call(KERNELS, seen, partial(build, arch=arch, table=table), own)


@lru_cache(1024)
def _prepared(device: torch.device, *call: Any) -> launcher.Prepared:
    """The same with the block sizes of the device; kept, for a layer is called once per token."""
    return _prepare(launcher.arch_of(device), None, *call)


def launch_matmul_nbits(inputs: Inputs, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels.

    Args:
        inputs: Contiguous.
        output: [B, T, O], of the type of the tokens.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    batch, tokens, width = inputs.input.shape
    sizes = {"B": batch, "T": tokens, "I": width, "O": inputs.blocks.shape[0]}
    sizes |= {"IW": inputs.blocks.shape[1], "IS": inputs.scales.shape[1]}
    if inputs.zero_points is not None:
        sizes["IZ"] = inputs.zero_points.shape[1]
    present = frozenset(name for name in ("zero_points", "offsets") if getattr(inputs, name) is not None)
    call = (tuple(sizes.items()), present, inputs.input.dtype, inputs.bits, inputs.block_size)
    if table is None:
        prepared = _prepared(inputs.input.device, *call)
    else:
        prepared = _prepare(launcher.arch_of(inputs.input.device), table, *call)
    tensors = {name: x for name, x in vars(inputs).items() if x is None or isinstance(x, Tensor)}
    launcher.Launcher().run(prepared, {**tensors, "output": output}, inputs.input)


def triton_matmul_nbits(inputs: Inputs) -> Tensor:
    """`naive_matmul_nbits` by the kernels, on CUDA; results and errors alike."""
    inputs.check()
    if inputs.input.device.type != "cuda":
        raise UnsupportedError(f"device {inputs.input.device.type!r} has no kernel; known: cuda.")
    given = {name: x.contiguous() for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    output = inputs.input.new_empty(*inputs.input.shape[:2], inputs.blocks.shape[0])
    launch_matmul_nbits(replace(inputs, **given), output)  # type: ignore[arg-type]
    return output
