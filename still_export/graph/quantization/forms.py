"""The storage form of each weight: the policy's bits, or the source's own blocks if those have no more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from still_export.errors import UnsupportedError
from still_export.graph.quantization.policy import DEFAULT_METHOD, DEQUANTIZED, HALF, Quantization
from still_export.mixers.roles import EMBEDDING
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.weights import Deferred, Pair, Weight, Weights
from still_kernels.matmul_nbits.spec import TILE

EXACT = "exact"
"""Method of blocks that are copied from the source unchanged."""
CODES = "codes"
"""Suffix of a weight's codes [K, N] in the shape that DequantizeLinear reads."""
LEAST = "least"
"""Suffix of the value of code 0, [N, K / block]: offset - MIDDLE * scale."""
MIDDLE = 8
"""Middle of 4-bit codes, which products subtract without zero points."""
FLOAT8_CODES = "e4m3"
"""Suffix of a weight's codes in e4m3, [N, K / 4] words."""
ORDER = "order"
"""Suffix of the inputs as codes have them, where that is another order than the weight's."""
K_QUANT = {4: "q4_k", 6: "q6_k"}
"""Suffix of the words of K-quants, by bits."""
ROWS = "rows"
"""Suffix of a weight's codes in the shape that GatherBlockQuantized reads."""
SUMS = "block_sums"
"""Prefix of the matrix [K, K / block] that sums over blocks; it is `inner` if there are offsets and no pairs."""
THIN, THIN_RATIO = 128, 4
"""A weight with fewer inputs, and this many times as many outputs, is of low rank: Mamba's dt_proj, RWKV-7's low-rank layers."""


@dataclass(frozen=True)
class Form:
    """How a weight is stored: blocks of `base` (None: zero), and separate LoRA `pairs`.

    Args:
        bits: Bits of the codes, or HALF.
        method: Rounding method: one of policy.METHODS, EXACT, or "half".
        base: The weight in the blocks.
        zero_points, offsets: Whether the blocks have them.
        half_scales: Scales are half precision numbers.
        codes: The blocks, if calibration computed them (calibrate.py).
        super_blocks: The blocks are K-quants.
    """

    bits: int
    method: str
    base: Weight | None
    zero_points: bool = False
    offsets: bool = False
    half_scales: bool = False
    pairs: tuple[Pair, ...] = ()
    codes: BlockWeight | None = None
    super_blocks: bool = False

    @property
    def order(self) -> np.ndarray | None:
        """Order of the inputs [K] in the blocks; None: the weight's own."""
        blocks = self.base.blocks if self.method == EXACT and isinstance(self.base, Deferred) else None
        return None if blocks is None else blocks.order


def form_of(weight: Weight, role: str, policy: Quantization, keep_wider: bool = False) -> Form | None:
    """The form of a weight with `role`; None: unchanged.

    `keep_wider`: blocks of the source with more bits than the policy's stay, too (see `_is_mixed`).

    K-quants stay where kernels read them. Other blocks of the source stay if they have at most the policy's bits and its blocks divide
    them. Weights of 5 and 6 bits, for which there is no other form, get 8.
    """
    bits = policy.bits(role)
    if bits is None:
        return None
    if bits == HALF:
        return Form(HALF, "half", weight)
    if policy.float8 and weight.dim() != 2:
        raise UnsupportedError("experts have no form in e4m3 (fp8). Export with --quantize int8.")
    base: Weight | None = weight
    pairs: tuple[Pair, ...] = ()
    if policy.lora == "apart" and isinstance(weight, Deferred) and weight.adapted is not None:
        base, pairs = weight.adapted.base, weight.adapted.pairs
    if base is None:
        return Form(bits, "lora", None, pairs=pairs)
    if isinstance(base, Deferred):
        blocks, super_blocks = base.blocks, base.super_blocks
        if super_blocks and policy.layout.super_blocks and weight.shape[0] % TILE == 0:
            return Form(super_blocks.bits, EXACT, base, half_scales=True, pairs=pairs, super_blocks=True)
        # Rows have only one form: 8 bits without offsets.
        if (
            blocks
            and blocks.float8 == policy.float8
            and blocks.size % policy.block_of(blocks.bits, weight.shape[-1]) == 0
            and (
                keep_wider or blocks.bits <= bits or base.bits < blocks.bits
            )  # the latter have fewer bits, which no narrower form stores
            and (policy.layout.zero_points or not blocks.zero_points)
            and (
                role != EMBEDDING
                or (blocks.bits == 8 and not blocks.zero_points and not blocks.offsets and blocks.order is None)
            )
            and (weight.dim() == 2 or blocks.bits == bits)  # both matrices of an expert have the same bits
        ):
            # TensorRT needs positive scales; a file's negative ones become offsets.
            turned = policy.layout.nodes == DEQUANTIZED and weight.dim() == 2
            offsets = blocks.offsets or (turned and blocks.negative)
            return Form(blocks.bits, EXACT, base, blocks.zero_points, offsets, blocks.half_scales, pairs)
        if base.bits in (5, 6) or (keep_wider and base.bits > bits):
            bits = 8
    zero_points = bits < 8 and policy.layout.zero_points
    method = policy.method if bits < 8 else DEFAULT_METHOD
    return Form(bits, method, base, zero_points, False, policy.layout.half_scales, pairs)


def _widen_experts(weights: Weights, forms: dict[str, Form], policy: Quantization) -> None:
    """Give both matrices of a layer's experts the larger number of bits, because the op has one (Q4_K_M files have 4 and 6)."""
    stacks = [name for name in forms if weights[name].dim() > 2]
    for name in stacks:
        form, layer = forms[name], name.rpartition(".")[0]
        most = max(forms[other].bits for other in stacks if other.rpartition(".")[0] == layer)
        if form.bits < most:
            forms[name] = Form(most, DEFAULT_METHOD, form.base, half_scales=policy.layout.half_scales, pairs=form.pairs)


def _is_mixed(weights: Weights, policy: Quantization) -> bool:
    """Whether the source has codes of at most 4 bits: those with more were chosen to keep them, and are not rounded again."""
    known = (weight for weight in weights.values() if isinstance(weight, Deferred))
    bases = (weight if weight.adapted is None else weight.adapted.base for weight in known)
    return policy.scheme == "int4" and any(isinstance(base, Deferred) and 0 < base.bits <= 4 for base in bases)


def plan_forms(
    weights: Weights, roles: Mapping[str, str], policy: Quantization
) -> tuple[Quantization, dict[str, Form]]:
    """Returns `policy` with the source's block size, and the forms of all weights by name.

    Second matrices of low-rank layers whose few inputs no block divides have no form: they stay unquantized, with a warning.

    Raises:
        UnsupportedError: The block size does not divide a wider weight.
    """
    known = [w for w in weights.values() if isinstance(w, Deferred) and w.blocks is not None]
    sizes = [(w.blocks.size, w.shape[-1]) for w in known if w.blocks and w.blocks.float8 == policy.float8]
    policy = policy.fitted([size for size, inputs in sizes if size < inputs])
    forms: dict[str, Form] = {}
    thin: list[str] = []
    keep_wider = _is_mixed(weights, policy)
    for name, weight in weights.items():
        if (form := form_of(weight, roles[name], policy, keep_wider)) is None:
            continue
        inputs = weight.shape[-1]
        block = 1 if form.bits == HALF or form.base is None else policy.block_of(form.bits, inputs)
        if not inputs % block:
            forms[name] = form
        elif weight.dim() == 2 and inputs < THIN and THIN_RATIO * inputs <= weight.shape[0]:
            thin.append(name)
        else:
            raise UnsupportedError(
                f"{name} has {inputs} inputs, which blocks of {policy.block_size} do not divide. "
                "Choose another --quantize-block, or export without --quantize."
            )
    _widen_experts(weights, forms, policy)
    if thin:
        logging.getLogger(__name__).warning(
            "%d weights of low rank, whose few inputs blocks of %d do not divide, are not quantized: %s%s.",
            len(thin),
            policy.block_size,
            ", ".join(thin[:3]),
            ", ..." if len(thin) > 3 else "",
        )
    return policy, forms
