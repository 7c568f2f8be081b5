"""The core launches what the Python launcher launches, of ops without a state: see test_launches.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from still_kernels.matmul_nbits.plan import SPANS
from tests.plugins.launches import made

Mirror = Callable[..., None]
EPSILON = {"norm_epsilon": 2e-6}


def aligned(*sizes: int, by: int = 8) -> int:
    return int(not any(size % by for size in sizes))


@pytest.mark.parametrize(
    "batch, count, outputs, inputs, span, beside",
    [
        (1, 1, 576, 1536, 0, ("weight", "residual")),
        (8, 1, 77, 83, 0, ("turned_weight",)),
        (3, 21, 4096, 72, 2, ("weight", "norm_weight")),
        (1, 65, 1544, 288, 1, ("turned_weight", "norm_weight", "residual")),
        (2, 300, 12288, 4096, 3, ("weight",)),
        (3, 5, 4096, 4096, 2, ("codes", "scales", "residual")),
        (1, 17, 72, 208, 0, ("codes", "scales")),
        (2, 300, 12288, 4096, 3, ("codes", "scales", "norm_weight")),
    ],
    ids=str,
)
def test_dense_matmul(
    batch: int, count: int, outputs: int, inputs: int, span: int, beside: tuple[str, ...], mirror: Mirror
) -> None:
    given = {
        "weight": made(inputs, outputs),
        "turned_weight": made(outputs, inputs),
        "norm_weight": made(inputs),
        "residual": made(batch, count, outputs),
        "codes": made(outputs, inputs // 4, kind=torch.int32),
        "scales": made(inputs // 128 if outputs == 4096 else 1, outputs, kind=torch.float32),
    }
    tensors = {"input": made(batch, count, inputs), **{name: given[name] for name in beside}}
    names = {"turned": "turned_weight", "normed": "norm_weight", "residual": "residual", "float8": "codes"}
    variant = {
        **{field: int(name in beside) for field, name in names.items()},
        "aligned": aligned(outputs, inputs),
        "whole": aligned(inputs, by=128 if "codes" in beside else 64),
        "span": span,
        "blocked": int("codes" in beside and outputs == 4096),
    }
    mirror("DenseMatMul", tensors, EPSILON, variant)


@pytest.mark.parametrize(
    "batch, count, width, middle, spans",
    [(1, 1, 576, 1536, (0, 1)), (3, 22, 4096, 14336, (2, 3)), (1, 65, 37, 83, (0, 0))],
)
def test_gated_mlp(batch: int, count: int, width: int, middle: int, spans: tuple[int, int], mirror: Mirror) -> None:
    tensors = {
        "input": made(batch, count, width),
        "norm_weight": made(width),
        "down": made(middle, width),
        "gate_up": made(width, 2 * middle),
    }
    whole = {"aligned": aligned(width, middle), "whole": aligned(width, middle, by=64)}
    mirror("GatedMlp", tensors, EPSILON, whole | dict(zip(("span", "gated_span"), spans, strict=True)))


@pytest.mark.parametrize(
    "batch, count, size, widths, biased, apart",
    [
        (1, 1, 64, (576, 192, 192, 576), True, False),
        (8, 1, 64, (576, 192, 192, 576), True, True),
        (3, 22, 128, (4096, 1024, 1024, 0), False, False),
        (2, 5, 6, (30, 18, 11, 7), False, False),
    ],
)
def test_rotary_qkv(
    batch: int, count: int, size: int, widths: tuple[int, int, int, int], biased: bool, apart: bool, mirror: Mirror
) -> None:
    """Sizes of outputs are attributes; a gate of size 0 is none."""
    tensors = {
        "input": made(batch, count, sum(widths[: 3 if apart else 4])),
        "cos": made(batch, count, size),
        "sin": made(batch, count, size),
    }
    tensors |= {"gate_bias": made(widths[3])} if biased else {}
    tensors |= {"gate_input": made(batch, count, widths[3])} if apart else {}
    by_name = dict(zip(("query", "key", "value", "gate"), widths, strict=True))
    attributes = {f"{name}_width": width for name, width in by_name.items()}
    outputs = {name: made(batch, count, width) for name, width in by_name.items() if width}
    variant = dict(gated=int(widths[3] > 0), biased=int(biased), aligned=aligned(*widths), apart=int(apart))
    mirror("RotaryQkv", tensors, attributes, variant, outputs)


@pytest.mark.parametrize(
    "batch, count, width, summed", [(1, 1, 576, True), (3, 22, 4096, True), (2, 5, 77, True), (3, 5, 4096, False)]
)
def test_add_rms_norm(batch: int, count: int, width: int, summed: bool, mirror: Mirror) -> None:
    tensors = {"input": made(batch, count, width), "norm_weight": made(width)}
    tensors |= {"residual": made(batch, count, width)} if summed else {}
    outputs = {name: made(batch, count, width) for name in ("sum", "output")}
    variant = dict(wide=int(width > 1024), summed=int(summed), aligned=aligned(width))
    mirror("AddRmsNorm", tensors, EPSILON, variant, outputs)


@pytest.mark.parametrize("batch, count, width", [(1, 1, 1536), (3, 22, 14336), (2, 5, 77)])
def test_swi_glu(batch: int, count: int, width: int, mirror: Mirror) -> None:
    outputs = {"output": made(batch, count, width)}
    tensors = {"input": made(batch, count, 2 * width)}
    mirror("SwiGlu", tensors, {"width": width}, {"aligned": aligned(width)}, outputs)


@pytest.mark.parametrize(
    "batch, count, sizes, added",
    [
        (1, 1, (576, 48, 960), True),
        (8, 1, (83, 11, 77), False),
        (3, 22, (576, 16, 576), True),
        (2, 300, (96, 70, 40), False),
    ],
)
def test_low_rank_matmul(batch: int, count: int, sizes: tuple[int, int, int], added: bool, mirror: Mirror) -> None:
    inputs, rank, outputs = sizes
    tensors = {"input": made(batch, count, inputs), "inner": made(inputs, rank), "outer": made(rank, outputs)}
    tensors |= {"base": made(batch, count, outputs)} if added else {}
    variant = {"base": int(added), "aligned": aligned(*sizes)}
    mirror("LowRankMatMul", tensors, {}, variant, {"output": made(batch, count, outputs)})


@pytest.mark.parametrize("batch, count, heads, size", [(1, 1, 8, 128), (3, 22, 3, 64), (2, 5, 1, 48)])
def test_round_key_value(batch: int, count: int, heads: int, size: int, mirror: Mirror) -> None:
    tensors = {name: made(batch, count, heads, size) for name in ("key", "value")}
    outputs = {f"rounded_{name}": made(batch, count, heads, size) for name in ("key", "value")}
    mirror("RoundKeyValue", tensors, {}, {"head_dim": size}, outputs)


@pytest.mark.parametrize("batch, count, vocabulary", [(1, 1, 49152), (3, 22, 77)])
def test_greedy_token(batch: int, count: int, vocabulary: int, mirror: Mirror) -> None:
    outputs = {"token": made(batch, count, kind=torch.int32)}
    tensors = {"logits": made(batch, count, vocabulary)}
    mirror("GreedyToken", tensors, {}, {"aligned": aligned(vocabulary)}, outputs)


@pytest.mark.parametrize(
    "batch, count, outputs, inputs, bits, beside, block",
    [
        (1, 1, 40, 288, 4, ("zero_points",), 32),
        (8, 1, 77, 288, 8, (), 32),
        (3, 21, 40, 320, 4, ("offsets",), 64),
        (1, 65, 77, 288, 8, ("zero_points", "offsets"), 32),
        (2, 300, 40960, 4096, 4, ("zero_points",), 32),
    ],
    ids=str,
)
def test_matmul_nbits(
    batch: int, count: int, outputs: int, inputs: int, bits: int, beside: tuple[str, ...], block: int, mirror: Mirror
) -> None:
    blocks = inputs // block
    tensors = {
        "input": made(batch, count, inputs),
        "blocks": made(outputs, inputs * bits // 32, kind=torch.int32),
        "scales": made(outputs, blocks),
    }
    optional = {
        "zero_points": made(outputs, -(-blocks * bits // 32), kind=torch.int32),
        "offsets": made(outputs, blocks),
    }
    tensors |= {name: optional[name] for name in beside}
    attributes = {"bits": bits, "block_size": block}
    variant = attributes | {name: int(name in beside) for name in optional}
    span = sum(outputs > most for most in SPANS)
    mirror("MatMulNBits", tensors, attributes, variant | {"aligned": aligned(outputs), "span": span})


@pytest.mark.parametrize(
    "count, set_", [(1, {}), (300, dict(score="sigmoid", groups=4, top_groups=2, epsilon=1e-20))], ids=str
)
def test_route(count: int, set_: dict[str, Any], mirror: Mirror) -> None:
    tensors = {"input": made(2, count, 2048), "router": made(72, 2048)}
    tensors |= {"bias": made(72, kind=torch.float32)} if set_ else {}
    attributes: dict[str, Any] = dict(
        k=6, normalize=1, scaling=2.446, score="softmax", epsilon=0.0, groups=1, top_groups=1
    )
    attributes |= set_
    grouped = int(bool(set_))
    variant = dict(score=attributes["score"], biased=grouped, grouped=grouped, experts=128, chosen=8)
    outputs = {"expert": made(2, count, 6, kind=torch.int32), "weight": made(2, count, 6, kind=torch.float32)}
    mirror("Route", tensors, attributes, variant, outputs)


@pytest.mark.parametrize(
    "bits, count, activation",
    [(0, 1, "swiglu"), (0, 9, "relu2"), (0, 300, "swiglu"), (0, 5000, "swiglu"), (4, 8, "swiglu"), (4, 5000, "relu2")],
)
def test_experts(bits: int, count: int, activation: str, mirror: Mirror) -> None:
    channels, inner, many, chosen = 256, 96, 72, 6
    rows = inner * (2 if activation == "swiglu" else 1)
    tensors = {
        "input": made(2, count, channels),
        "expert": made(2, count, chosen, kind=torch.int32),
        "weight": made(2, count, chosen, kind=torch.float32),
    }
    attributes: dict[str, Any] = {"activation": activation} | ({"bits": 4, "block_size": 32} if bits else {})
    for name, height, width in (("gate_up", rows, channels), ("down", channels, inner)):
        if not bits:
            tensors[name] = made(many, height, width)
            continue
        tensors |= {
            name: made(many, height, width // 8, kind=torch.int32),
            f"{name}_scales": made(many, height, width // 32),
            f"{name}_zero_points": made(many, height, -(-width // 256), kind=torch.int32),
        }
    mirror("ExpertsNBits" if bits else "Experts", tensors, attributes, {"activation": activation, "experts": 128})
