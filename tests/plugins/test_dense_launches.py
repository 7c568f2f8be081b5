"""The core launches of the products and of what lies between them what the Python launcher launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from still_kernels.add_rms_norm import plan as add_rms_norm
from still_kernels.add_rms_norm.plan import Variant as NormVariant
from still_kernels.add_rms_norm.spec import ADD_RMS_NORM
from still_kernels.dense_matmul import plan as dense_matmul
from still_kernels.dense_matmul.plan import Variant
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from still_kernels.gated_mlp import plan as gated_mlp
from still_kernels.gated_mlp.plan import Variant as GatedVariant
from still_kernels.gated_mlp.spec import GATED_MLP
from still_kernels.greedy_token import plan as greedy_token
from still_kernels.greedy_token.plan import Variant as TokenVariant
from still_kernels.greedy_token.spec import GREEDY_TOKEN
from still_kernels.low_rank_matmul import plan as low_rank_matmul
from still_kernels.low_rank_matmul.plan import Variant as LowRankVariant
from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL
from still_kernels.rotary_qkv import plan as rotary_qkv
from still_kernels.rotary_qkv.plan import Variant as RotaryVariant
from still_kernels.rotary_qkv.spec import ROTARY_QKV
from still_kernels.round_key_value import plan as round_key_value
from still_kernels.round_key_value.plan import Variant as RoundVariant
from still_kernels.round_key_value.spec import ROUND_KEY_VALUE
from still_kernels.swi_glu import plan as swi_glu
from still_kernels.swi_glu.plan import Variant as GateVariant
from still_kernels.swi_glu.spec import SWI_GLU
from tests.plugins.test_launches import fake_compiler, mirror  # noqa: F401  # fixtures

pytest.importorskip("triton")


def made(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


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
    batch: int, count: int, outputs: int, inputs: int, span: int, beside: tuple[str, ...], mirror: Callable[..., None]  # noqa: F811
) -> None:  # fmt: skip
    given = {
        "weight": made(inputs, outputs),
        "turned_weight": made(outputs, inputs),
        "norm_weight": made(inputs),
        "residual": made(batch, count, outputs),
        "codes": torch.empty((outputs, inputs // 4), dtype=torch.int32, device="meta"),
        "scales": torch.empty((inputs // 128 if outputs == 4096 else 1, outputs), device="meta"),
    }
    tensors = {"input": made(batch, count, inputs), **{name: given[name] for name in beside}}
    call = dense_matmul.Inputs(**tensors, norm_epsilon=2e-6)
    variant = Variant(
        "float16",
        *(int(name in beside) for name in ("turned_weight", "norm_weight", "residual")),
        aligned=int(outputs % 8 == 0 and inputs % 8 == 0),
        whole=int(inputs % (128 if "codes" in beside else 64) == 0),
        span=span,
        float8=int("codes" in beside),
        blocked=int("codes" in beside and outputs == 4096),
    )
    mirror(DENSE_MATMUL, tensors, lambda output: dense_matmul.OP.launch(call, output), variant, {"norm_epsilon": 2e-6})


@pytest.mark.parametrize(
    "batch, count, width, middle, spans",
    [(1, 1, 576, 1536, (0, 1)), (3, 22, 4096, 14336, (2, 3)), (1, 65, 37, 83, (0, 0))],
)
def test_gated_mlp(
    batch: int, count: int, width: int, middle: int, spans: tuple[int, int], mirror: Callable[..., None]  # noqa: F811
) -> None:  # fmt: skip
    tensors = {
        "input": made(batch, count, width),
        "norm_weight": made(width),
        "down": made(middle, width),
        "gate_up": made(width, 2 * middle),
    }
    call = gated_mlp.Inputs(**tensors, norm_epsilon=2e-6)
    variant = GatedVariant(
        "float16", int(width % 8 == 0 and middle % 8 == 0), int(width % 64 == 0 and middle % 64 == 0), *spans
    )
    mirror(GATED_MLP, tensors, lambda output: gated_mlp.OP.launch(call, output), variant, {"norm_epsilon": 2e-6})


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
    batch: int, count: int, size: int, widths: tuple[int, int, int, int], biased: bool, apart: bool,
    mirror: Callable[..., None]  # noqa: F811
) -> None:  # fmt: skip
    """Sizes of outputs are attributes; a gate of size 0 is none."""
    tensors = {
        "input": made(batch, count, sum(widths[: 3 if apart else 4])),
        "cos": made(batch, count, size),
        "sin": made(batch, count, size),
    }
    tensors |= {"gate_bias": made(widths[3])} if biased else {}
    tensors |= {"gate_input": made(batch, count, widths[3])} if apart else {}
    attributes = dict(zip(("query_width", "key_width", "value_width", "gate_width"), widths, strict=True))
    call = rotary_qkv.Inputs(**tensors, **attributes)  # type: ignore[arg-type]
    outputs = {n: made(batch, count, w) for n, w in zip(("query", "key", "value", "gate"), widths, strict=True) if w}
    variant = RotaryVariant(
        "float16", int(widths[3] > 0), int(biased), int(not any(w % 8 for w in widths)), apart=int(apart)
    )
    mirror(
        ROTARY_QKV,
        tensors,
        lambda *results: rotary_qkv.OP.launch(call, *results),
        variant,
        attributes,
        outputs=outputs,
    )


@pytest.mark.parametrize(
    "batch, count, width, summed", [(1, 1, 576, True), (3, 22, 4096, True), (2, 5, 77, True), (3, 5, 4096, False)]
)
def test_add_rms_norm(batch: int, count: int, width: int, summed: bool, mirror: Callable[..., None]) -> None:  # noqa: F811
    tensors = {"input": made(batch, count, width), "norm_weight": made(width)}
    tensors |= {"residual": made(batch, count, width)} if summed else {}
    call = add_rms_norm.Inputs(**({"residual": None} | tensors), norm_epsilon=2e-6)
    outputs = {name: made(batch, count, width) for name in ("sum", "output")}
    mirror(
        ADD_RMS_NORM,
        tensors,
        lambda *results: add_rms_norm.OP.launch(call, *results),
        NormVariant("float16", int(width > 1024), int(summed), int(not width % 8)),
        {"norm_epsilon": 2e-6},
        outputs=outputs,
    )


@pytest.mark.parametrize("batch, count, width", [(1, 1, 1536), (3, 22, 14336), (2, 5, 77)])
def test_swi_glu(batch: int, count: int, width: int, mirror: Callable[..., None]) -> None:  # noqa: F811
    tensors = {"input": made(batch, count, 2 * width)}
    mirror(
        SWI_GLU,
        tensors,
        lambda *results: swi_glu.OP.launch(swi_glu.Inputs(**tensors, width=width), *results),
        GateVariant("float16", int(not width % 8)),
        {"width": width},
        outputs={"output": made(batch, count, width)},
    )


@pytest.mark.parametrize(
    "batch, count, sizes, added",
    [(1, 1, (576, 48, 960), True), (8, 1, (83, 11, 77), False), (3, 22, (576, 16, 576), True), (2, 300, (96, 70, 40), False)],
)  # fmt: skip
def test_low_rank_matmul(
    batch: int, count: int, sizes: tuple[int, int, int], added: bool, mirror: Callable[..., None]  # noqa: F811
) -> None:  # fmt: skip
    inputs, rank, outputs = sizes
    tensors = {"input": made(batch, count, inputs), "inner": made(inputs, rank), "outer": made(rank, outputs)}
    tensors |= {"base": made(batch, count, outputs)} if added else {}
    call = low_rank_matmul.Inputs(**tensors)
    mirror(
        LOW_RANK_MATMUL,
        tensors,
        lambda output: low_rank_matmul.OP.launch(call, output),
        LowRankVariant("float16", int(added), int(not any(size % 8 for size in sizes))),
        {},
        outputs={"output": made(batch, count, outputs)},
    )


@pytest.mark.parametrize("batch, count, heads, size", [(1, 1, 8, 128), (3, 22, 3, 64), (2, 5, 1, 48)])
def test_round_key_value(batch: int, count: int, heads: int, size: int, mirror: Callable[..., None]) -> None:  # noqa: F811
    tensors = {name: made(batch, count, heads, size) for name in ("key", "value")}
    mirror(
        ROUND_KEY_VALUE,
        tensors,
        lambda *results: round_key_value.OP.launch(round_key_value.Inputs(**tensors), *results),
        RoundVariant("float16", size),
        {},
        outputs={f"rounded_{name}": made(batch, count, heads, size) for name in ("key", "value")},
    )


@pytest.mark.parametrize("batch, count, vocabulary", [(1, 1, 49152), (3, 22, 77)])
def test_greedy_token(batch: int, count: int, vocabulary: int, mirror: Callable[..., None]) -> None:  # noqa: F811
    tensors = {"logits": made(batch, count, vocabulary)}
    call = greedy_token.Inputs(**tensors)
    mirror(
        GREEDY_TOKEN,
        tensors,
        lambda token: greedy_token.OP.launch(call, token),
        TokenVariant("float16", int(not vocabulary % 8)),
        {},
        outputs={"token": torch.empty(batch, count, dtype=torch.int32, device="meta")},
    )
