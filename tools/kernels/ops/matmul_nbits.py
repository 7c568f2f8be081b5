"""Calls of still::MatMulNBits for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.matmul_nbits.plan import WORD_BITS, Inputs, dequantized
from still_kernels.tile import Setting
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one, stages

MOVES: dict[str, list[Setting]] = {
    "few": [
        *one("BN", 16, 32, 64),
        *one("UNITS", 1, 2, 4),
        *one("AHEAD", 0, 1, 2),
        {"SPLITS": 2, "num_warps": 2},
        {"SPLITS": 4, "num_warps": 4},
        {"SPLITS": 8, "num_warps": 8},
    ],
    "unpack": [*one("BN", 4, 8, 16, 32), *one("BW", 16, 32, 64, 128), *one("num_warps", 2, 4, 8)],
    "multiply": [
        *one("BM", 64, 128, 256),
        *one("BN", 64, 128, 256),
        *one("BK", 32, 64),
        *stages(2, 3, 4),
        *one("num_warps", 4, 8),
    ],
}
"""What is tried from the current setting and then from better ones, by kernel."""


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    """Linear layers of a transformer, those of one value as one; 4 bits have zero points."""
    hidden, bits, size = sizes["heads"] * sizes["head_dim"], sizes["bits"], sizes["block_size"]
    outputs, inputs = {
        "query, key, value": (hidden + 2 * sizes["kv_heads"] * sizes["head_dim"], hidden),
        "output": (hidden, hidden),
        "gate and up": (2 * sizes["width"], hidden),
        "down": (hidden, sizes["width"]),
        "head": (sizes["vocabulary"], hidden),
    }[layer]
    blocks = inputs // size
    codes, scales = draw.words(outputs, inputs * bits // WORD_BITS), draw.scales(outputs, blocks)
    zero_points = draw.words(outputs, -(-blocks * bits // WORD_BITS)) if bits == 4 else None
    return Inputs(draw.tokens(inputs), codes, scales, zero_points, bits, size)


CALLS = Calls(
    draw=_draw,
    flop=lambda x: 2.0 * x.input.numel() * x.scales.shape[0],
    beside=lambda x: (x.input, dequantized(x)),
    plain=lambda pair: pair[0] @ pair[1].T,
    moves=MOVES,
    decode=frozenset({"few"}),
    layers=("query, key, value", "output", "gate and up", "down", "head"),
    sizes={"bits": 4, "block_size": 32},
    peer="cuBLAS, 16 bits",
)
