"""The PyTorch form: the chunks of linear attention, whose tokens write twice: what they bring, and what they read before."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.linear_attention.chunked import ChunkTerms, blocks, over_chunks, within_chunks
from still_kernels.rank_one_attention.naive import Inputs


def chunked_rank_one_attention(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results and errors as of `naive_rank_one_attention`, any split of a sequence gives the same."""
    x = {name: blocks(tensor) for name, tensor in inputs.spread(state).items()}  # [B, H, chunks, C, ...]
    query, key, value, reading, writing = (x[n] for n in ("query", "key", "value", "read_key", "write_key"))
    asked = torch.stack((query, reading), dim=-2)
    of_keys = within_chunks(asked, key, x["decay"], None).scores.unflatten(-2, (-1, 2))
    written = within_chunks(query[..., None, :], writing, x["decay"], -reading)
    start, to_end = written.prefix.exp(), written.suffix.exp()
    assert written.inverse is not None
    taken = written.inverse @ (start * reading)
    terms = ChunkTerms(
        added=torch.cat((written.inverse @ (of_keys[..., 1, :].tril(-1) @ value), value), dim=-2),
        taken=torch.cat((-taken, torch.zeros_like(taken)), dim=-2),
        read=query * start,
        scores=torch.cat((written.scores, of_keys[..., 0, :]), dim=-1),
        left=start[..., -1, :],
        kept=(torch.cat((writing, key), dim=-2) * torch.cat((to_end, to_end), dim=-2)).transpose(-1, -2),
    )
    output, present = over_chunks(terms, state, inputs.query.shape[1], 1)
    return output.squeeze(3).to(inputs.query.dtype).contiguous(), present
