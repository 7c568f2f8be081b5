"""still::BetweenAttention: what lies between a layer's attention and the next one's, for one token; sums in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_graphs.ops.between_attention import BETWEEN_ATTENTION, MOST_BLOCKS, MOST_INPUTS, MOST_WIDTH
from still_kernels.common.stateless import Calls, StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Check, Launch, Plan, Region
from still_kernels.tile import KernelTile, TileTable, one

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from still_kernels.common.calls import Draw

BLOCKS = "(2 * I + M + O + gate_width) // 16"
PLAN = Plan(
    BETWEEN_ATTENTION,
    key=keyed(attended="A", width="I", middle="M", outputs="O", gate="gate_width"),
    checks=(
        Check("tokens == 1", "{tokens} tokens: the kernel takes one."),
        Check("has(next_gate_weight) == (gate_width > 0)", "gate_width={gate_width}: a gate's weight has one."),
    ),
    persistent=(Region("words", "int32", ("2 * I + M + 4",)),),
    arguments={"epsilon": "norm_epsilon"},
    steps=(Launch("between", (BLOCKS, "1", "1")),),
)
SIZES = (
    Check(
        "A % 16 == 0 and I % 16 == 0 and M % 16 == 0 and O % 16 == 0 and gate_width % 16 == 0",
        "sizes {A}, {I}, {M}, {O} and {gate_width}: the kernel has multiples of 16.",
    ),
    Check(
        f"{BLOCKS} <= {MOST_BLOCKS} and max(A, M, 2 * I) <= {MOST_INPUTS} and I <= {MOST_WIDTH}",
        f"sizes {{A}}, {{I}}, {{M}}, {{O}} and {{gate_width}}: the kernel has up to {MOST_BLOCKS} times 16 outputs, of up to {MOST_INPUTS} "
        f"inputs, and tokens of up to {MOST_WIDTH} numbers.",
    ),
)
"""As `in_one_launch` says it."""


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tokens and weights of one call, of one type.

    attention: [B, T, A].
    residual: [B, T, I], what the layer's attention is added to.
    output_weight: [A, I].
    norm_weight, next_norm_weight: [I]; norm_epsilon is added to the mean square of a token before its root divides the token.
    down: [M, I].
    gate_up: [I, 2 * M], the gate's outputs first.
    next_weight, next_gate_weight: [I, O], [I, gate_width]; without a gate None and 0.
    """

    attention: Tensor
    residual: Tensor
    output_weight: Tensor
    norm_weight: Tensor
    down: Tensor
    gate_up: Tensor
    next_norm_weight: Tensor
    next_weight: Tensor
    next_gate_weight: Tensor | None = None
    norm_epsilon: float = 1e-5
    gate_width: int = 0


@defined
def naive_between_attention(inputs: Inputs, wide: dtype) -> tuple[Tensor, ...]:
    """What the next layer adds to, [B, T, I], what its attention reads, [B, T, O], and where it has one its gate, [B, T, gate_width]."""
    from still_kernels.common.naive import naive_gate, naive_norm

    kind = inputs.attention.dtype

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return naive_norm(x, weight, inputs.norm_epsilon, wide).to(kind).to(wide)

    x = (inputs.residual.to(wide) + inputs.attention.to(wide) @ inputs.output_weight.to(wide)).to(kind)
    middle = naive_gate(normed(x, inputs.norm_weight) @ inputs.gate_up.to(wide)).to(kind)
    layer = (x.to(wide) + middle.to(wide) @ inputs.down.to(wide)).to(kind)
    rows = normed(layer, inputs.next_norm_weight)
    weights = (w for w in (inputs.next_weight, inputs.next_gate_weight) if w is not None)
    return layer, *(rows @ weight.to(wide) for weight in weights)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """A, I, M, O and gate_width, of which the kernel is made; by default SmolLM2-135M's."""

    attended: int = 576
    width: int = 576
    middle: int = 1536
    outputs: int = 960
    gate: int = 576


THREADS = 384
"""256 and 512 are within 2% of it (H100)."""


def tile_table(variant: Variant, arch: int) -> TileTable:
    """The kernel of a variant."""
    sizes = {name.upper(): getattr(variant, name) for name in ("attended", "width", "middle", "outputs", "gate")}
    return TileTable({"between": KernelTile({**sizes, "THREADS": THREADS}, THREADS // 32)})


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    width, middle = sizes["heads"] * sizes["head_dim"], sizes["width"]
    outputs, gate = width + 2 * sizes["kv_heads"] * sizes["head_dim"], width if layer == "gated" else 0
    tokens = draw.tokens(width), draw.tokens(width)
    layer_weights = (
        draw.weight(width, width),
        draw.norm(width),
        draw.weight(middle, width),
        draw.weight(width, 2 * middle),
    )
    after = draw.norm(width), draw.weight(width, outputs)
    return Inputs(*tokens, *layer_weights, *after, draw.weight(width, gate) if gate else None, gate_width=gate)


def _by_cublas(x: Inputs) -> tuple[Tensor, ...]:
    """By nine launches, norms and gates by kernels of ours: what ONNX Runtime has in the place of the op."""
    from still_kernels import add_rms_norm, swi_glu

    def normed(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        total, rows = add_rms_norm.OP(add_rms_norm.Inputs(x, y, weight, epsilon))
        return total, rows

    total, rows = normed(x.residual, x.attention @ x.output_weight, x.norm_weight, x.norm_epsilon)
    middle = swi_glu.OP(swi_glu.Inputs(rows @ x.gate_up, x.down.shape[0]))
    layer, rows = normed(total, middle @ x.down, x.next_norm_weight, x.norm_epsilon)
    weights = (w for w in (x.next_weight, x.next_gate_weight) if w is not None)
    return layer, *(rows @ weight for weight in weights)


def _flop(x: Inputs) -> float:
    weights = x.output_weight, x.down, x.gate_up, x.next_weight, x.next_gate_weight
    return 2.0 * x.attention[..., 0].numel() * sum(weight.numel() for weight in weights if weight is not None)


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, gate=gate) for dtype in HALVES for gate in (576, 0)],
    tile_table,
    naive_between_attention,
    Calls(
        draw=_draw,
        flop=_flop,
        moves={"between": one("THREADS", 256, 384, 512)},
        decode=frozenset({"between"}),
        layers=("gated", "plain"),
        peer="cuBLAS",
        sizes={"heads": 9, "kv_heads": 3, "head_dim": 64, "width": 1536},
        plain=_by_cublas,
        one_token=True,
    ),
    module="still_kernels.between_attention.cuda_between",
    covers="GEMMs with dense weights have",
    also=SIZES,
    optional={"next_gate_weight": "gate", "next_gate": "gate"},
)
