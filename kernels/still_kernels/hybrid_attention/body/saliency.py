"""Self-saliency of tokens from the logits of their local window."""

from __future__ import annotations

import math

from still_graphs.functions.builder import FLOAT, Scope
from still_kernels.hybrid_attention.body.layer import Layer

RELEASED_EPSILON = 1e-8


def self_saliency(
    b: Scope,
    layer: Layer,
    logits: str,
    own: str,
    others: str,
    alone: str,
    own_column: str,
    last_slot: str,
    rest_mask: str = "",
) -> str:
    """Score of each row's token.

    Args:
        logits: Scaled, [..., W].
        own: The token's own logit, [..., 1].
        others: Columns of its window except its own, bool, broadcast against `logits`.
        alone: No other token, bool, broadcast against [..., 1]; "" if every token has others.
        own_column: The token's own column, bool. last_slot: Columns in slot C-1 (position mod C), bool.
        rest_mask: `others` as a mask, if the caller has it.

    Returns:
        [..., 1].
    """
    if layer.saliency == "released_prefill":
        score = _released(b, layer, logits, others, own_column, last_slot)
    else:
        # logsumexp as maximum - log(largest probability): a fused softmax is several times faster than ReduceLogSumExp.
        rest = b("Add", logits, rest_mask or layer.mask(b, others))
        log_share = b("Log", b("ReduceMax", b("Softmax", rest, axis=-1), [-1]))
        score = b("Add", b("Sub", own, b("ReduceMax", rest, [-1])), log_share)
    return b("Where", alone, math.inf, score) if alone else score


def _released(b: Scope, layer: Layer, logits: str, others: str, own_column: str, last_slot: str) -> str:
    """Divergence that the released training code ranks by; slots without a token count once each."""
    chunk, eps = float(layer.chunk), RELEASED_EPSILON
    safe = b("Or", others, own_column)
    minus = layer.mask

    def floored(visible: str, norm: float) -> str:
        probability = b("Softmax", b("Add", logits, minus(b, visible)), axis=-1)
        probability = b("Where", visible, probability, 0.0)
        return b("Div", b("Add", probability, eps), norm)

    p = floored(safe, 1 + chunk * eps)
    norm_q = 1 + chunk * eps + 1 / chunk
    q = b("Where", last_slot, 1 / chunk + eps, floored(others, norm_q))
    terms = b("Mul", p, b("Log", b("Div", p, b("Add", q, eps))))
    score = b("ReduceSum", b("Where", safe, terms, 0.0), [-1])
    present = b("ReduceSum", b.cast(safe, FLOAT), [-1])
    has_last = b("ReduceMax", b.cast(b("And", safe, last_slot), FLOAT), [-1])
    empty_p, empty_q = eps / (1 + chunk * eps), eps / norm_q
    lone = empty_p * math.log(empty_p / (1 / chunk + eps + eps))
    absent = b("Sub", b("Add", b("Neg", present), has_last), 1.0 - chunk)  # C - present - (1 - has_last)
    missing = b("Mul", absent, empty_p * math.log(empty_p / (empty_q + eps)))
    return b.total(score, missing, b("Mul", b("Sub", 1.0, has_last), lone))
