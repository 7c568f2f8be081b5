"""One module as teacher and student: the same projections with softmax, with hybrid attention, or with both compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.mixers.trainable import SOFTMAX, STUDENT, TRANSFER, relative_error, softmax_attention
from still_kernels.hybrid_attention.call import hybrid_attention_whole
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.selection import group_scores
from still_kernels.recompute import fused

FACTOR_SPEED = 5.0
"""Logarithm of a window factor per unit of its trained exponent. Factors differ by orders of magnitude between heads, and AdamW
moves a parameter by at most about its rate each step."""


class TrainableAttention(StillAttention):
    """StillAttention as a `Trainable`; the teacher's projections include active LoRA.

    window_factor_exponent: Trained exponent of the softmax terms' weight per head, [H]; None: the configuration's weight.
    """

    mode: str = STUDENT
    save_memory: bool = False
    window_factor_exponent: nn.Parameter | None
    selection_queries: Tensor | None = None
    selection_target: Tensor | None = None
    difference: Tensor | None = None
    selection: Tensor | None = None

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        """Like StillAttention; with a cache always hybrid attention."""
        if past_key_values is not None:
            return super().mix(hidden, position_embeddings, past_key_values)
        project = fused(TrainableAttention.project, hidden.device, None)
        if self.mode == TRANSFER:
            with torch.no_grad():
                query, key, value, _ = project(self, hidden, position_embeddings)
                output = softmax_attention(query, key, value)
            gate = None if self.g_proj is None else torch.sigmoid(self.g_proj(hidden)).view(query.shape)
            self.difference = fused(relative_error, query.device)(self._hybrid(query, key, value, gate), output)
        else:
            query, key, value, gate = project(self, hidden, position_embeddings)
            soft = self.mode == SOFTMAX
            output = softmax_attention(query, key, value) if soft else self._hybrid(query, key, value, gate)
            if self.selection_queries is not None:
                self._watch(query, key, self.selection_queries)
        return self.o_proj(output.flatten(2))

    def _watch(self, query: Tensor, key: Tensor, positions: Tensor) -> None:
        """The selection's loss if gradients are needed, its target otherwise."""
        rows = len(positions)
        query, key = query[:rows], key[:rows]
        with torch.autocast(query.device.type, enabled=False):
            if torch.is_grad_enabled():
                loss_of = fused(selection_loss, query.device)
                self.selection = loss_of(query, key, positions, self.still, self.selection_target)
            else:
                self.selection_target = fused(far_attention, query.device)(query, key, positions, self.still)

    def _hybrid(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None) -> Tensor:
        dtype = value.dtype
        arguments = (query.to(dtype), key.to(dtype), value, None if gate is None else gate.to(dtype))
        if self.save_memory and torch.is_grad_enabled():
            return checkpoint(self._attend, *arguments, use_reentrant=False)
        return self._attend(*arguments)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None) -> Tensor:
        # The kernel chooses its own precision: S, z and features are float32 whatever the GEMMs around it use.
        with torch.autocast(query.device.type, enabled=False):
            exponent = self.window_factor_exponent
            factor = None if exponent is None else window_factor(exponent.float())
            weights = (self.feature_q_weight, self.feature_k_weight)
            return hybrid_attention_whole(Inputs(query, key, value, gate, *weights, window_factor=factor), self.still)


def window_factor(exponent: Tensor) -> Tensor:
    """Weight of the softmax terms: positive; a few units of `exponent`, as training changes it, are enough for any weight in use."""
    return torch.exp(FACTOR_SPEED * exponent)


def make_trainable(model: nn.Module, learn_window_factors: bool = False) -> list[TrainableAttention]:
    """Convert the model's StillAttention modules to TrainableAttention, in place; parameter names stay.

    Args:
        learn_window_factors: Give each a frozen `window_factor_exponent` that starts at the configuration's factors.
    """
    found = [module for module in model.modules() if isinstance(module, StillAttention)]
    for module in found:
        module.__class__ = TrainableAttention  # wrapping would rename the parameters
        module.register_parameter("window_factor_exponent", None)
        if learn_window_factors:
            start = torch.tensor(module.still.window_factor or [1.0] * module.still.num_heads)
            exponent = (start.log() / FACTOR_SPEED).to(module.feature_q_weight.device)
            module.window_factor_exponent = nn.Parameter(exponent, requires_grad=False)
    return found  # type: ignore[return-value]


def selection_loss(query: Tensor, key: Tensor, positions: Tensor, config: Any, target: Tensor | None = None) -> Tensor:
    """A loss that makes tokens salient which later queries attend to.

    Selection by top-k has no derivative. This loss is the cross-entropy between full-softmax attention to tokens beyond the window and the
    softmax over the selection scores of each chunk. Its optimum is finite; with a loss on ranks alone, scores grow without bound. Heads
    that select together share their scores.

    Args:
        query: After RoPE, [B, T, H, D]; T is cut to whole chunks.
        key: [B, T, HK, D].
        positions: Positions of the queries used, int64 [B, n].
        config: HybridAttentionConfig.
        target: Result of `far_attention`; None: computed from query and key.

    Returns:
        Scalar, the mean over B, n, H; 0 if there are no tokens beyond the windows.
    """
    chunk, salient = config.chunk_size, config.salient_per_chunk
    chunks = query.shape[1] // chunk
    if chunks < 3 or not 0 < salient < chunk:
        return query.new_zeros(())
    weight = far_attention(query, key, positions, config) if target is None else target
    q, k = _whole_chunks(query, key, config)
    scores = margins(q, k, chunk)
    scores = group_scores(torch.cat([scores[..., 1:2].detach(), scores[..., 1:]], dim=-1), config)
    weight = weight.unflatten(1, (scores.shape[1], -1)).mean(2)
    ranked = scores.unflatten(2, (chunks, chunk)).log_softmax(-1)
    return -(weight.unflatten(2, (chunks, chunk)) * ranked).sum((2, 3)).mean()


@torch.no_grad()
def far_attention(query: Tensor, key: Tensor, positions: Tensor, config: Any) -> Tensor:
    """Squared full-softmax attention of some queries to the tokens before their windows; arguments: see `selection_loss`.

    Squaring favours the few heads that look up single tokens; attention spread over hundreds of tokens is left to the linear state.

    Returns:
        [B, H, T], the mean over n; T is cut to whole chunks.
    """
    chunk = config.chunk_size
    q, k = _whole_chunks(query, key, config)
    index = positions.clamp_max(q.shape[2] - 1)
    queries = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    far = torch.arange(q.shape[2], device=q.device)
    seen = far <= index[..., None]  # [B, n, T]
    attention = (queries @ k.transpose(-1, -2) * config.head_dim**-0.5).masked_fill(~seen[:, None], -torch.inf)
    beyond = far // chunk <= (index // chunk - 2)[..., None]
    weight = (attention.softmax(-1) * beyond[:, None]).square().mean(2)
    weight[..., 0] = 0  # position 0 is always salient
    return weight


def _whole_chunks(query: Tensor, key: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Query and key of every head as float32 [B, H, T, D], T cut to whole chunks."""
    whole = query.shape[1] // config.chunk_size * config.chunk_size
    q, k = (x[:, :whole].transpose(1, 2).float() for x in (query, key))
    return q, k.repeat_interleave(config.group_size, dim=1)


def margins(q: Tensor, k: Tensor, chunk: int) -> Tensor:
    """Self-saliency of every token, [B, H, T], from q and k [B, H, T, D] with T a multiple of C; large and finite at position 0."""
    q = q.unflatten(2, (-1, chunk))
    k = k.unflatten(2, (-1, chunk))
    before = torch.cat([torch.zeros_like(k[:, :, :1]), k[:, :, :-1]], dim=2)
    logits = q @ torch.cat([before, k], dim=3).transpose(-1, -2) * q.shape[-1] ** -0.5  # [B, H, chunks, C, 2C]
    row, column = torch.arange(chunk, device=q.device)[:, None], torch.arange(2 * chunk, device=q.device)
    others = (column > row) & (column < row + chunk)
    logits_own = logits.diagonal(offset=chunk, dim1=-2, dim2=-1)
    first = torch.arange(q.shape[2], device=q.device)[:, None, None] == 0
    absent = ~others | (first & (column < chunk))
    rest = logits.masked_fill(absent, -1e4).logsumexp(-1)
    return (logits_own - rest).flatten(2)
