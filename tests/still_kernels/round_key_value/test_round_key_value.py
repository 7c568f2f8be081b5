"""The kernel of still::RoundKeyValue against what caches hold: in Triton's interpreter, compiled on a GPU; and its machine code."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from still_kernels.round_key_value.plan import naive_round_key_value
from tests.round_key_value_cases import CASES, call, exact
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.round_key_value.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.round_key_value.plan import Variant  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_interpreter(name: str) -> None:
    assert interpreted()[name] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_definition(name: str, dtype: torch.dtype) -> None:
    given = call(CASES[name], 2, 3, dtype)
    for result, rows in zip(naive_round_key_value(given), (given.key, given.value), strict=True):
        assert torch.equal(result, exact(rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.zeros(1, 1, 2, 64).half()}, r"value: expected \[1, 1, 3, 64\]"),
        ({"value": torch.zeros(1, 1, 3, 64)}, "value: expected torch.float16, got torch.float32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        naive_round_key_value(replace(call(CASES["64"], 1, 1), **change))


def test_refusals() -> None:
    """What no kernel covers, with what is covered."""
    seen = Call({"B": 1, "T": 1, "HK": 2, "D": 260}, {}, dtype="float32")
    assert kernels_of("RoundKeyValue").refusals(seen) == [
        "activations are float32; roundings of keys and values have kernels for float16, bfloat16.",
        "head_dim=260; the kernels have at most 256.",
    ]


def test_unknown_device_is_refused() -> None:
    from still_kernels.round_key_value.plan import OP

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(call(CASES["64"], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant(), Variant(head_dim=48)], ids=str)
def test_machine_code(variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills."""
    if compiled_before(inputs("RoundKeyValue", variant, 90)):
        return
    entry, cubins = compile_variant("RoundKeyValue", variant, 90)
    for name, kernel in entry["kernels"].items():
        found = {line.name.split(".")[0] for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))}
        assert not {"STL", "LDL"} & found, f"{name} spills"
