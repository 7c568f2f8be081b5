"""Holds the kernels of still::Route, Experts and ExpertsNBits to float64; as a program ([NAME ...]): in Triton's interpreter, prints the
errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from still_kernels.tile import Setting, TileTable
from tests.still_kernels.experts.inputs import ROUTERS, as_dense, exact, experts_inputs, nbits_inputs, route_inputs
from tests.still_kernels.stateless_cases import launched, main, worst_error

CALLS = [(1, 1), (2, 3), (1, 33), (1, 131)]
"""A few tokens; so many that experts have part of a block each; and more, which is said once of each kind of matrix."""
EXPERTS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "relu2": {"activation": "relu2"},
    "aligned": {"channels": 96, "inner": 64},
    "4 bits": {"bits": 4, "zero_points": True},
    "4 bits around the middle": {"bits": 4, "zero_points": False, "activation": "relu2"},
    "8 bits": {"bits": 8, "zero_points": True},
    "4 bits, bfloat16": {"bits": 4, "zero_points": True, "dtype": torch.bfloat16},
    "8 bits around the middle, bfloat16": {"bits": 8, "zero_points": False, "dtype": torch.bfloat16},
    "4 bits, float32": {"bits": 4, "zero_points": True, "dtype": torch.float32},
}
CASES = [*(f"route: {name}" for name in ROUTERS), *EXPERTS]
SMALL: dict[str, Setting] = {
    "few_gate_up": {"BN": 16, "BK": 32},
    "few_down": {"BN": 16, "BK": 32},
    "few_codes_gate_up": {"SPLITS": 2, "UNITS": 1},
    "few_codes_down": {"SPLITS": 2, "UNITS": 1},
    "count": {"BP": 64},
    "sort": {"BP": 64},
    **{f"some_{name}": {"BM": 16, "BN": 32, "BK": 32} for name in ("gate_up", "down")},
    **{f"many_{name}": {"BM": 32, "BN": 32, "BK": 32} for name in ("gate_up", "down")},
    "add": {"BC": 64},
    "few_scores": {"BK": 16},
    "scores": {"BM": 16, "BN": 32, "BK": 16},
}
"""Blocks so small that these calls have several of each."""


def given_for(name: str, batch: int, tokens: int) -> Any:
    """The inputs of a call."""
    if name.startswith("route: "):
        return route_inputs(name.removeprefix("route: "), batch, tokens, torch.float16)
    more = {"dtype": torch.float16, **EXPERTS[name]}
    return nbits_inputs(batch, tokens, block=32, **more) if "bits" in more else experts_inputs(batch, tokens, **more)


def expected_of(name: str, given: Any) -> list[torch.Tensor]:
    """What the op gives: of a router integers and float32, else float64."""
    from still_kernels.route.meaning import naive_route

    if name.startswith("route: "):
        return list(naive_route(given))
    return [exact(as_dense(given) if hasattr(given, "bits") else given)]


def table_of(op: Any, given: Any, device: str) -> TileTable | None:
    """Small blocks for the interpreter, else None."""
    from still_kernels.plan import Call
    from still_kernels.sizes import tensors_of
    from still_kernels.tile import changed

    if device != "cpu":
        return None
    spec, shapes = op.kernels.spec, {name: x.shape for name, x in tensors_of(given).items()}
    dtype = str(given.input.dtype).removeprefix("torch.")
    call = Call.of(spec, shapes, {a.name: getattr(given, a.name) for a in spec.attributes}, dtype, None)
    table: TileTable = op.tiles(op.kernels.variant_of(call), 90)
    for kernel in table.tiles.keys() & SMALL.keys():
        table = changed(table, kernel, SMALL[kernel])
    return table


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.experts.plan import OP as EXPERTS_OP
    from still_kernels.experts_nbits.plan import OP as NBITS_OP
    from still_kernels.route.plan import OP as ROUTE_OP

    op = ROUTE_OP if name.startswith("route: ") else NBITS_OP if "bits" in EXPERTS[name] else EXPERTS_OP
    worst = 0.0
    for batch, tokens in CALLS if name in ("swiglu", "aligned", "4 bits", "4 bits, bfloat16") else CALLS[:-1]:
        given = given_for(name, batch, tokens)
        expected = expected_of(name, given)
        found = launched(op.launch, given, expected, table_of(op, given, device), device)
        worst = max(worst, worst_error(found, expected))
    return worst


if __name__ == "__main__":
    main(run_case, CASES)
