"""Definition of still::RankOneAttention in PyTorch, 64 tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.linear_attention.chunked import ChunkTerms, blocks, over_chunks, within_chunks
from still_kernels.rank_one_attention.spec import RANK_ONE_ATTENTION
from still_kernels.sizes import sizes_of_call, tensors_of
from still_kernels.torch_ops import traced_op


@dataclass(frozen=True)
class Inputs:
    """Tokens and counts of one call; fp16, bf16, fp32 or fp64.

    decay: Logarithm of the state's decay at each token, at most 0, [B, T, H, D].
    read_key: Key that reads the state before a token is written, [B, T, H, D].
    write_key: Key with which that value is added, [B, T, H, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    read_key: Tensor
    write_key: Tensor
    new_tokens: Tensor

    def spread(self, state: Tensor) -> dict[str, Tensor]:
        """The tensors by name in the state's type. They are 0 at padding, which leaves the state unchanged bit for bit."""
        sizes, tensors = sizes_of_call(RANK_ONE_ATTENTION, self, recurrent_state=state), tensors_of(self)
        wide = torch.promote_types(self.query.dtype, torch.float32)
        if state.dtype != wide:
            raise ShapeError(f"state: expected {wide}, got {state.dtype}.")
        counts = tensors.pop("new_tokens")
        padding = torch.arange(sizes["T"], device=state.device) >= counts[:, None]
        return {name: x.to(wide).masked_fill(padding[..., None, None], 0) for name, x in tensors.items()}


def chunked_rank_one_attention(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Rank-one attention in at least float32. Any split of a sequence gives the same result.

    With the state S, the decay g, and the reading and writing keys r and w, for each head and token:

        S := exp(g) S,  S := S + k v^T + w (S^T r)^T,  output = S^T q

    Args:
        state: State before the call, [B, H, D, V].

    Returns:
        output [B, T, H, V], dtype of query, 0 at padding; and the state after the call.
    """
    x = {name: blocks(tensor) for name, tensor in inputs.spread(state).items()}  # [B, H, chunks, C, ...]
    query, key, value, reading, writing = (x[n] for n in ("query", "key", "value", "read_key", "write_key"))
    queries = torch.stack((query, reading), dim=-2)
    of_keys = within_chunks(queries, key, x["decay"], None).scores.unflatten(-2, (-1, 2))
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
        write=(torch.cat((writing, key), dim=-2) * torch.cat((to_end, to_end), dim=-2)).transpose(-1, -2),
    )
    output, present = over_chunks(terms, state, inputs.query.shape[1], 1)
    return output.squeeze(3).to(inputs.query.dtype).contiguous(), present


rank_one_attention = traced_op(RANK_ONE_ATTENTION, Inputs)(chunked_rank_one_attention)
"""`chunked_rank_one_attention` as one node in a traced program."""
