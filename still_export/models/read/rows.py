"""Adapter tensors in 8 or 6 bits: integers, and scales of rows under names of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from still_export.errors import CheckpointError

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SCALE = ".scale"
"""Suffix for the scales of a tensor's rows."""
DIAGONAL = ".diagonal"
"""Suffix for the diagonals of square matrices whose rows have 6 bits."""
PARTS = (SCALE, DIAGONAL)
GREATEST = {8: 127, 6: 31}
"""Largest magnitude by bits."""


def is_part(name: str, names: Collection[str]) -> bool:
    """Whether `name` is a part of another tensor of `names`."""
    return any(name.endswith(end) and name.removesuffix(end) in names for end in PARTS)


def int8_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor` [..., N] as int8 and its scales, float16 [...]: a row's greatest magnitude is 127 of them.

    Raises:
        CheckpointError: A scale leaves float16's range.
    """
    return _rounded(tensor.float(), 8)


def int6_rows(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Square matrices `tensor` [..., N, N] near the identity in 6 bits, scales and diagonals float16 [..., N].

    Four numbers of a row, padded with zeros, become three uint8. The diagonal is stored separately, because it is much larger than the
    other numbers of its row.

    Raises:
        CheckpointError: A scale or diagonal leaves float16's range.
    """
    wide = tensor.float()
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    codes, scale = _rounded(wide - torch.diag_embed(diagonal), 6)
    if not bool(diagonal.half().isfinite().all()):
        raise CheckpointError("a diagonal is beyond float16. Store the adapter with --adapter-dtype int8.")
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4))
    a, b, c, d = (codes.short() + 32).unflatten(-1, (-1, 4)).unbind(-1)
    packed = torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], -1) & 255
    return packed.to(torch.uint8).flatten(-2), scale, diagonal.half()


def _rounded(wide: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    greatest = GREATEST[bits]
    # Divided by the stored scale; if it was rounded down, the largest value is clipped by less than a step.
    scale = (wide.abs().amax(-1) / greatest).half().clamp_min(torch.finfo(torch.float16).tiny)
    if not bool(scale.isfinite().all()):
        raise CheckpointError(
            f"a row is beyond what int{bits} with a float16 scale holds. Store the adapter with --adapter-dtype float16."
        )
    return (wide / scale.float()[..., None]).round().clamp(-greatest, greatest).to(torch.int8), scale


def from_rows(rows: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """The float32 tensor of `int8_rows` or `int6_rows`; `rows` themselves without `parts`, which are keyed by suffix.

    Raises:
        CheckpointError: The parts are not those of the rows.
    """
    scale, diagonal = parts.get(SCALE), parts.get(DIAGONAL)
    if scale is None or rows.dtype not in (torch.int8, torch.uint8):
        return rows
    if rows.dtype == torch.uint8 or diagonal is not None:
        size = rows.shape[-2] if rows.dim() > 1 else 0
        fits = diagonal is not None and diagonal.shape == scale.shape and rows.shape[-1] == (size + 3) // 4 * 3
        if rows.dtype != torch.uint8 or not fits:
            raise CheckpointError(
                f"low-bit rows have type {rows.dtype} and shape {list(rows.shape)}, their diagonals "
                f"{None if diagonal is None else list(diagonal.shape)}: no square matrices of 6 bits. The file is damaged; "
                "fetch it again."
            )
        x, y, z = rows.short().unflatten(-1, (-1, 3)).unbind(-1)
        rows = (
            torch.stack([x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2], -1).flatten(-2)[..., :size]
            - 32
        )
    if scale.dtype not in FLOAT_TYPES or scale.shape != rows.shape[:-1]:
        raise CheckpointError(
            f"scales of low-bit rows have shape {list(scale.shape)} and type {scale.dtype}, the rows {list(rows.shape)}. The file is "
            "damaged; fetch it again."
        )
    tensor = rows.float() * scale.float()[..., None]
    return tensor if diagonal is None else tensor + torch.diag_embed(diagonal.float())
