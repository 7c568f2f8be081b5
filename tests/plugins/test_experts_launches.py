"""The core launches of the router and the experts what the Python launcher launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from still_kernels.experts import plan as experts
from still_kernels.experts.meaning import Inputs
from still_kernels.experts.spec import EXPERTS
from still_kernels.experts_nbits import plan as experts_nbits
from still_kernels.experts_nbits.meaning import Inputs as NBitsInputs
from still_kernels.experts_nbits.spec import EXPERTS_NBITS
from still_kernels.route import plan as route
from still_kernels.route.meaning import Inputs as RouteInputs
from still_kernels.route.spec import ROUTE
from tests.plugins.test_launches import fake_compiler, mirror  # noqa: F401  # fixtures

pytest.importorskip("triton")


def made(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "count, set_", [(1, {}), (300, dict(score="sigmoid", groups=4, top_groups=2, epsilon=1e-20))], ids=str
)
def test_route(count: int, set_: dict[str, Any], mirror: Callable[..., None]) -> None:  # noqa: F811
    tensors = {"input": made(2, count, 2048), "router": made(72, 2048)}
    tensors |= {"bias": made(72, dtype=torch.float32)} if set_ else {}
    attributes = {
        "k": 6,
        "normalize": 1,
        "scaling": 2.446,
        "score": "softmax",
        "epsilon": 0.0,
        "groups": 1,
        "top_groups": 1,
        **set_,
    }
    call = RouteInputs(**tensors, **attributes)  # type: ignore[arg-type]
    variant = route.Variant("float16", attributes["score"], int(bool(set_)), int(bool(set_)), 128, 8)
    outputs = {"expert": made(2, count, 6, dtype=torch.int32), "weight": made(2, count, 6, dtype=torch.float32)}
    mirror(ROUTE, tensors, lambda *results: route.OP.launch(call, *results), variant, attributes, outputs=outputs)


@pytest.mark.parametrize(
    "bits, count, activation",
    [(0, 1, "swiglu"), (0, 9, "relu2"), (0, 300, "swiglu"), (0, 5000, "swiglu"), (4, 8, "swiglu"), (4, 5000, "relu2")],
)
def test_experts(bits: int, count: int, activation: str, mirror: Callable[..., None]) -> None:  # noqa: F811
    channels, inner, many, chosen = 256, 96, 72, 6
    rows = inner * (2 if activation == "swiglu" else 1)
    tensors = {
        "input": made(2, count, channels),
        "expert": made(2, count, chosen, dtype=torch.int32),
        "weight": made(2, count, chosen, dtype=torch.float32),
    }
    outputs = {"output": made(2, count, channels)}
    if not bits:
        tensors |= {"gate_up": made(many, rows, channels), "down": made(many, channels, inner)}
        call, op = Inputs(**tensors, activation=activation), experts.OP  # type: ignore[arg-type]
        variant = experts.Variant("float16", activation, 128)
        mirror(EXPERTS, tensors, lambda *y: op.launch(call, *y), variant, {"activation": activation}, outputs=outputs)
        return
    for name, height, width in (("gate_up", rows, channels), ("down", channels, inner)):
        tensors |= {
            name: made(many, height, width // 8, dtype=torch.int32),
            f"{name}_scales": made(many, height, width // 32),
            f"{name}_zero_points": made(many, height, -(-width // 256), dtype=torch.int32),
        }
    attributes = {"activation": activation, "bits": 4, "block_size": 32}
    low = NBitsInputs(**tensors, **attributes)  # type: ignore[arg-type]
    kernels = experts_nbits.Variant("float16", activation, 128)
    mirror(EXPERTS_NBITS, tensors, lambda *y: experts_nbits.OP.launch(low, *y), kernels, attributes, outputs=outputs)
