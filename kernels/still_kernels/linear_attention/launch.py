"""Runs the plan of still::LinearAttention with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.linear_attention.inputs import Inputs
from still_kernels.linear_attention.pages import Pages
from still_kernels.linear_attention.variants import KERNELS
from still_kernels.packing import Packing, size_of_call
from still_kernels.tile import TileTable

_prepared = launcher.kept(KERNELS)


def launch_linear_attention(
    inputs: Inputs,
    state: Tensor,
    output: Tensor,
    packing: Packing | None = None,
    table: TileTable | None = None,
    past_length: Tensor | None = None,
) -> None:
    """Run the kernels on `state` [B or rows, H, D, V], in place.

    Args:
        inputs: Contiguous; without a packing `new_tokens` are given. Packed tokens are [tokens, ...].
        output: [B, T, H, G, V] or [tokens, H, G, V], dtype of query.
        state: With pages in the packing their `view`.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.
        past_length: With pages: tokens that each of the call's sequences has seen, [B].

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    query = inputs.query
    batch, tokens, packed = size_of_call(query, packing, state.shape[0])
    sizes = {"B": batch, "T": tokens, "HQ": query.shape[-3], "G": query.shape[-2], "D": query.shape[-1]}
    sizes |= {"HK": inputs.key.shape[-2], "H": inputs.value.shape[-2], "V": inputs.value.shape[-1]}
    sizes |= {} if inputs.decay is None else {"E": inputs.decay.shape[-1]}
    sizes |= {} if inputs.beta is None else {"W": inputs.beta.shape[-1]}
    present = tuple(name for name in ("decay", "beta") if getattr(inputs, name) is not None)
    attributes = (("update_rule", inputs.update_rule), ("scale", inputs.scale))
    own: tuple[tuple[str, int], ...] = ()
    if packing is not None and packing.pages is not None:
        assert isinstance(packing.pages, Pages) and past_length is not None
        own = (("RAGGED", 1), ("PAGE", packing.pages.size_bytes // 4))  # `triton_common.state_of_head`
    prepared = _prepared(query.device, table, query.dtype, tuple(sizes.items()), attributes, present, packed, own)
    tensors = {
        **{name: x for name, x in vars(inputs).items() if x is None or isinstance(x, Tensor)},
        "recurrent_state": state,
        "output": output,
        "past_length": past_length,
        **({} if packing is None else packing.tensors()),
    }
    launcher.Launcher().run(prepared, tensors, query)


def triton_linear_attention(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """`dispatch.linear_attention` by the Triton kernels, on CUDA; the state must be contiguous where it is written in place."""
    sizes = inputs.check(state)
    query = inputs.query
    launcher.check_device(query)
    present = launcher.written(state, in_place)
    new_tokens = inputs.new_tokens
    if new_tokens is None:
        new_tokens = torch.full((sizes.B,), sizes.T, dtype=torch.int64, device=query.device)
    given = {name: x.contiguous() for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    given |= {name: x.float() for name, x in given.items() if name in ("decay", "beta")}
    output = torch.empty(sizes.B, sizes.T, sizes.H, sizes.G, sizes.V, dtype=query.dtype, device=query.device)
    whole = {**given, "new_tokens": new_tokens.contiguous()}
    launch_linear_attention(
        Inputs(**whole, update_rule=inputs.update_rule, scale=inputs.scale),  # type: ignore[arg-type]
        present,
        output,
    )
    return output, present
