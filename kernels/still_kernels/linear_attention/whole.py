"""Linear attention of whole sequences from an empty state: the form that training differentiates.

No loop over chunks, nothing that depends on values: torch.compile takes it in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_kernels.linear_attention.chunked import chunk_terms
from still_kernels.linear_attention.inputs import Inputs, empty_state


def whole_linear_attention(inputs: Inputs) -> Tensor:
    """Linear attention of sequences that have seen nothing; output and errors as of `naive_linear_attention`."""
    batch, tokens = inputs.query.shape[:2]
    heads, size = inputs.value.shape[2:]
    state = empty_state(batch, heads, inputs.query.shape[-1], size, inputs.query.dtype, inputs.query.device)
    sizes = inputs.check(state)
    terms = chunk_terms(inputs)
    # What a chunk makes of the state before it: step S + new, a matrix where the delta rule takes from S, else a factor per row.
    step = terms.left[..., None]
    if terms.taken is not None:
        step = torch.diag_embed(terms.left.expand(*terms.left.shape[:-1], sizes.D)) - terms.kept @ terms.taken
    states = _states_before(step, terms.kept @ terms.added)
    new = terms.added if terms.taken is None else terms.added - terms.taken @ states
    output = (terms.read @ states + terms.scores @ new).unflatten(-2, (-1, sizes.G)).flatten(2, 3)
    return output[:, :, :tokens].transpose(1, 2).to(inputs.query.dtype).contiguous()


def _states_before(step: Tensor, new: Tensor) -> Tensor:
    """States before each chunk [B, H, chunks, D, V] of S := step S + new from S = 0, by joining neighbours: log2(chunks) levels.

    Args:
        step: [B, H, chunks, D, D], or [B, H, chunks, 1 or D, 1] that rows are multiplied with.
        new: [B, H, chunks, D, V].
    """
    chunks = new.shape[2]
    matrix = step.shape[-1] > 1

    def earlier(x: Tensor, by: int) -> Tensor:
        """What lies `by` chunks before each chunk; 0 before the first."""
        return pad(x[:, :, : chunks - by], (0, 0, 0, 0, by, 0))

    reach = 1
    while reach < chunks - 1:  # `new` and `step` are of the latest `reach` chunks together
        before = earlier(new, reach)
        new = new + (step @ before if matrix else step * before)
        # Before the first chunk the state is 0: whatever a step makes of it is 0 too.
        step = step @ earlier(step, reach) if matrix else step * earlier(step, reach)
        reach *= 2
    return earlier(new, 1)
