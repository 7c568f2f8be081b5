"""From device to the form of the choice of blocks that computes it there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.forms import has_kernels
from still_kernels.select_blocks.naive import Inputs, naive_select_blocks


def select_blocks(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """As of `naive_select_blocks`; on CUDA by the Triton kernels, where they cover the call."""
    if not has_kernels(inputs.query.device):
        return naive_select_blocks(inputs, state)
    from still_kernels.select_blocks.launch import launch_select_blocks

    inputs.check(state)
    call = replace(inputs, query=inputs.query.contiguous(), key=inputs.key.contiguous())
    sums = launcher.written(state, in_place=False)
    shape = (*inputs.key.shape[:3], inputs.block_slots)
    blocks = torch.full(shape, -1, dtype=torch.int32, device=state.device)
    try:
        launch_select_blocks(call, sums, blocks)
    except UnsupportedError:
        return naive_select_blocks(inputs, state)
    return blocks, sums
