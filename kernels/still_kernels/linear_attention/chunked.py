"""still::LinearAttention in PyTorch, 64 tokens at a time: with a state, and for training whole sequences from an empty state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_kernels.linear_attention.meaning import Inputs, empty_state
from still_kernels.linear_attention.spec import DELTA

CHUNK = 64
"""Tokens of a chunk, a power of two. The inverted matrix has this many rows, and its error grows with them: 7e-6 for the worst keys of the
design (cosine 0.97, beta 2)."""


def chunked_linear_attention(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Linear attention of new tokens, in at least float32. Any split of a sequence gives the same result.

    With the state S, the decay g and beta b, for each head and token; `linear` has no decay, and `delta` rules have the correction:

        S := exp(g) S,  S := S + k (v)^T  or  S + b k (v - S^T k)^T,  output = scale * S^T q

    Args:
        state: State before the call, [B, H, D, V].
        in_place: Write into `state`, and return it.

    Returns:
        output [B, T, H, G, V], dtype of query, 0 at padding, which affects nothing else; and the state after the call.

    Raises:
        ShapeError: A tensor does not fit, or the rule needs a missing one.
    """
    sizes = inputs.check(state)
    output, present = over_chunks(chunk_terms(inputs), state, sizes.T, sizes.G)
    output = output.to(inputs.query.dtype).contiguous()
    return output, state.copy_(present) if in_place else present


def over_chunks(terms: ChunkTerms, state: Tensor, tokens: int, shared: int) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, G, V] in the state's type, and the state after the call."""
    batch, heads, _, size = state.shape
    outputs = [state.new_zeros(batch, heads, 0, shared, size)]
    present = state
    for i in range(terms.added.shape[2]):
        new = terms.added[:, :, i]
        if terms.taken is not None:
            new = new - terms.taken[:, :, i] @ present
        out = terms.read[:, :, i] @ present + terms.scores[:, :, i] @ new
        outputs.append(out.unflatten(2, (-1, shared)))
        present = terms.left[:, :, i, :, None] * present + terms.write[:, :, i] @ new
    return torch.cat(outputs, dim=2)[:, :, :tokens].transpose(1, 2), present


@dataclass
class ChunkTerms:
    """Values of the chunks of a call [B, H, chunks, ...] that do not depend on the state. With S the state before a chunk:

        new = added - taken S,  output = read S + scores new,  S := left S + write new

    added: [.., C, V]. taken: [.., C, D], of the delta rules. read: [.., C * G, D]. scores: [.., C * G, C].
    left: [.., 1 or D]. write: [.., D, C].
    """

    added: Tensor
    taken: Tensor | None
    read: Tensor
    scores: Tensor
    left: Tensor
    write: Tensor


def chunk_terms(inputs: Inputs) -> ChunkTerms:
    """The terms of a call in chunks of `CHUNK` tokens, or one shorter chunk; the last chunk is padded."""
    query, key, value, decay, beta = inputs.spread()
    query, key, value = blocks(query), blocks(key), blocks(value)
    gates = torch.zeros_like(key[..., :1]) if decay is None else blocks(decay)
    steps = blocks(beta)[..., None] if beta is not None and inputs.update_rule in DELTA else None
    within = within_chunks(query, key, gates, None if steps is None else steps * key)
    start = within.prefix.exp()  # decay of the state up to each token
    to_end = within.suffix.exp()  # decay of a token up to the chunk's end
    corrected = within.inverse is not None and steps is not None
    return ChunkTerms(
        added=within.inverse @ (steps * value) if corrected else value,  # type: ignore[operator]
        taken=within.inverse @ (steps * start * key) if corrected else None,  # type: ignore[operator]
        read=(query * start[..., None, :]).flatten(-3, -2),
        scores=within.scores,
        left=start[..., -1, :],
        write=(key * to_end).transpose(-1, -2),
    )


def blocks(x: Tensor) -> Tensor:
    """[B, T, H, ...] as [B, H, chunks, C, ...]."""
    tokens = x.shape[1]
    chunk = min(CHUNK, 1 << max(tokens - 1, 0).bit_length())
    count = -(-tokens // chunk)
    x = pad(x, (*[0] * (2 * x.dim() - 4), 0, count * chunk - tokens))
    return x.unflatten(1, (count, chunk)).movedim(3, 1)


class Within:
    """Relations between tokens of a block, for blocks of 1, 2, 4 .. C tokens, until the chunk is one block.

    prefix, suffix: Sums of the decay [.., 1 or D] from the block's first token up to each, and after each up to its last. They are never
    differences of long sums, which lose precision after a strong decay and are NaN for an infinite one.
    scores: [.., block * G, block], query times key under the decay between them, lower triangle.
    inverse: [.., block, block], inverse of I + A, where A is the same product of correction keys and keys, below the diagonal; None without
    corrections.
    """

    def __init__(self, prefix: Tensor, suffix: Tensor, scores: Tensor, inverse: Tensor | None) -> None:
        self.prefix, self.suffix, self.scores, self.inverse = prefix, suffix, scores, inverse


def within_chunks(query: Tensor, key: Tensor, decay: Tensor, reading: Tensor | None) -> Within:
    """The terms of chunks [.., C, ...], by joining neighbouring blocks.

    The part below the diagonal is a product of the second block's rows, decayed from its start, and the first block's, decayed to its end.
    All exponents are sums of decays, at most 0.

    Args:
        reading: [.., C, D], keys with which corrections read the state, beta times key in the delta rules; None: no corrections.
    """
    lead, chunk, shared = key.shape[:-2], key.shape[-2], query.shape[-2]
    prefix, suffix = decay[..., None, :], torch.zeros_like(decay)[..., None, :]  # [.., blocks, 1, 1 or D]
    scores = (query * key[..., None, :]).sum(-1)[..., None]  # [.., C, G, 1]
    inverse = None if reading is None else torch.ones_like(key[..., :1])[..., None]
    size = 1
    while size < chunk:
        pairs = (*lead, chunk // (2 * size), 2)

        def halves(x: Tensor, pairs: tuple[int, ...] = pairs) -> tuple[Tensor, Tensor]:
            """Blocks [.., blocks, ...] as the first and the second of each pair."""
            x = x.reshape(*pairs, *x.shape[len(pairs) - 1 :])
            return x.select(len(pairs) - 1, 0), x.select(len(pairs) - 1, 1)

        def rows(x: Tensor, size: int = size) -> Tensor:
            return x.reshape(*lead, chunk // size, size, *x.shape[len(lead) + 1 :])

        first, second = halves(prefix)
        behind_first, behind_second = halves(suffix)
        left = halves(rows(key))[0] * behind_first.exp()
        decayed = second.exp()
        queries = (halves(rows(query))[1] * decayed[..., None, :]).flatten(-3, -2)  # [.., size * G, D]
        scores = _joined(*halves(scores), queries @ left.transpose(-1, -2))
        if inverse is not None and reading is not None:
            above, below = halves(inverse)
            between = (halves(rows(reading))[1] * decayed) @ left.transpose(-1, -2)
            inverse = _joined(above, below, -(below @ between @ above))
        prefix = torch.cat((first, second + first[..., -1:, :]), dim=-2)
        suffix = torch.cat((behind_first + second[..., -1:, :], behind_second), dim=-2)
        size *= 2
    whole = len(lead)
    prefix, suffix, scores = prefix.squeeze(whole), suffix.squeeze(whole), scores.squeeze(whole)
    assert scores.shape[-2] == chunk * shared
    return Within(prefix, suffix, scores, None if inverse is None else inverse.squeeze(whole))


def _joined(first: Tensor, second: Tensor, between: Tensor) -> Tensor:
    """[first, 0; between, second]."""
    upper = pad(first, (0, second.shape[-1]))
    return torch.cat((upper, torch.cat((between, second), dim=-1)), dim=-2)


def whole_linear_attention(inputs: Inputs) -> Tensor:
    """Linear attention of new sequences; output and errors: see `chunked_linear_attention`."""
    batch, tokens = inputs.query.shape[:2]
    heads, size = inputs.value.shape[2:]
    state = empty_state(batch, heads, inputs.query.shape[-1], size, inputs.query.dtype, inputs.query.device)
    sizes = inputs.check(state)
    terms = chunk_terms(inputs)
    # Effect of a chunk on the state before it: step S + new. `step` is a matrix if the delta rule subtracts from S, else a factor per row.
    step = terms.left[..., None]
    if terms.taken is not None:
        step = torch.diag_embed(terms.left.expand(*terms.left.shape[:-1], sizes.D)) - terms.write @ terms.taken
    states = _states_before(step, terms.write @ terms.added)
    new = terms.added if terms.taken is None else terms.added - terms.taken @ states
    output = (terms.read @ states + terms.scores @ new).unflatten(-2, (-1, sizes.G)).flatten(2, 3)
    return output[:, :, :tokens].transpose(1, 2).to(inputs.query.dtype).contiguous()


def _states_before(step: Tensor, new: Tensor) -> Tensor:
    """States before each chunk [B, H, chunks, D, V] of S := step S + new from S = 0, by joining neighbours in log2(chunks) levels.

    Args:
        step: [B, H, chunks, D, D], or factors of rows [B, H, chunks, 1 or D, 1].
        new: [B, H, chunks, D, V].
    """
    chunks = new.shape[2]
    matrix = step.shape[-1] > 1

    def earlier(x: Tensor, by: int) -> Tensor:
        """Values of the chunk `by` chunks earlier; 0 before the first."""
        return pad(x[:, :, : chunks - by], (0, 0, 0, 0, by, 0))

    reach = 1
    while reach < chunks - 1:  # `new` and `step` combine the latest `reach` chunks
        before = earlier(new, reach)
        new = new + (step @ before if matrix else step * before)
        # Before the first chunk the state is 0, and a step of 0 is 0.
        step = step @ earlier(step, reach) if matrix else step * earlier(step, reach)
        reach *= 2
    return earlier(new, 1)
