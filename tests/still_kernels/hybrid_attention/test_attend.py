"""Both kernels of attend against its meaning in float64: on a GPU, and each in an interpreter of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.still_kernels.interpreted import run_cases
from tests.tolerances import NARROW_NORM, REFERENCE

pytest.importorskip("triton")

from still_kernels import launcher, tile
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.sm90 import gluon_attend
from still_kernels.packing import Packing
from tests.still_kernels.hybrid_attention import attend_cases

SCRIPT = Path(__file__).with_name("attend_cases.py")


INTERPRETED = (
    "part of a tile",
    "ragged, padded",
    "packed",
    "paged",
    "beyond the capacity",
    "segments, packed",
    "phantom",
)


def check(errors: dict[str, float], dtype: torch.dtype) -> None:
    """Nothing is NaN that should not be, nothing beside the output was written, every run gives the same bits."""
    assert {what: errors[what] for what in ("wrong", "outside", "repeats") if errors[what]} == {}
    assert errors["error"] <= REFERENCE[dtype]
    assert errors["norm"] <= (NARROW_NORM if dtype != torch.float32 else REFERENCE[dtype])


FAST = (
    "ragged, three programs",
    "packed",
    "paged, several blocks",
    "segments, packed",
    "three salient",
    "beyond the capacity",
    "phantom",
    "unpacked",
    "head size 64",
)


OTHERS_SHOW_IT = (
    *(
        "whole tiles",
        "one chunk",
        "past, whole chunks",
        "past, no tile complete",
    ),  # of fewer tokens and rows than ragged ones
    *(
        "ragged",
        "ragged, one program",
        "packed, three programs",
        "twelve heads, seven programs",
    ),  # another number of programs
    *(
        "paged",
        "paged, head size 64",
        "float16",
        "head size 64, several blocks",
        "group of one",
    ),  # in pairs with one more
    *("no gate", "five salient", "more slots than known"),  # between two others
)
"""Cases of which every part is in others. On a GPU all run."""


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in FAST
        else pytest.param(name, marks=[pytest.mark.slow] + [pytest.mark.long] * (name in OTHERS_SHOW_IT))
        for name in attend_cases.CASES
        if name != "long"
    ],
)
def test_gluon_in_threads(name: str) -> None:
    """On the CPU: masks, what waits for what, and what is read of memory that nobody wrote."""
    check(attend_cases.run_case(name, "tma", "cpu", repeats=1), getattr(torch, attend_cases.CASES[name].dtype))


@pytest.mark.parametrize(
    ("text", "instead", "why"),
    [
        ("_clear(held.value.index(entry % c.SLOTS), known - block * BN, c.D)", "pass", "wrong"),
        ("(o_slot < seen)[None, :]", "(o_slot < seen + 1)[None, :]", "wrong|error"),
        (
            "p_ring_value + p_old, begin, length, end,",
            "p_ring_value + p_old, begin, length, end + 9,",
            "wrong|outside",
        ),
        ("mbarrier.arrive(bars.v_empty.index(slot), count=1)\n\n            # Linear", "# Linear", "waits for"),
        ("_pass_over(entry + 1, bars", "_pass_over(entry, bars", "arrivals|waits for|changed"),
        (
            "mbarrier.wait(bars.v_full.index(v_slot), (before // SLOTS) & 1)",
            "pass",
            "wrong|error|changed|arrivals|waits",
        ),
        ("number += 1\n        else:", "number += 2\n        else:", "waits for|changed|wrong|error|arrivals"),
    ],
    ids=lambda text: text[:40],
)
def test_the_threads_find_what_is_wrong(
    text: str, instead: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one line of the kernel changed."""
    interpreter = attend_cases.gluon_interpreter()
    monkeypatch.setattr(interpreter, "PATIENCE_S", 1.0)
    source = Path(gluon_attend.__file__).read_text()
    assert source.count(text) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(source.replace(text, instead))
    found = interpreter.interpreted(changed)
    monkeypatch.setattr(interpreter, "interpreted", lambda path: found)
    with pytest.raises((AssertionError, interpreter.Stuck), match=why):
        for _ in range(10):  # a wait that is missing shows where a copy comes late
            check(attend_cases.run_case("ragged, three programs", "tma", "cpu", repeats=1), torch.bfloat16)


@pytest.mark.slow
def test_the_cases_in_the_interpreter() -> None:
    """What is expected of both kernels, shown with the one that Triton's interpreter can run."""
    for errors in run_cases(SCRIPT, INTERPRETED, "triton").values():
        check(errors, torch.float32)


def test_what_no_descriptor_can_be_made_of_takes_the_other_kernel() -> None:
    aligned = torch.zeros(64, dtype=torch.bfloat16)
    assert launch.can_be_described((aligned, None, aligned[8:]))
    assert not launch.can_be_described((aligned, aligned[1:]))


LAYERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_heads": 32, "num_kv_heads": 8},
    "float16, 64, group": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "select_scope": "kv_group_max"},
    "factor, no gate": {"num_heads": 4, "num_kv_heads": 2, "window_factor": (0.5, 1.0, 2.0, 0.1), "gate": "none"},
    "released": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 64, "profile": "released"},
    "packed": {"num_heads": 4, "num_kv_heads": 1, "salient_per_chunk": 7},
}
CALLS = ((700, [700, 333]), (64, [0, 64]), (2, [2, 1]), (1500, [129, 1500]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_calls_agree_whichever_kernel_they_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend writes no state: states are the same bits, outputs differ by the order of sums; calls take the kernel of sm_90."""
    dtype = torch.float16 if "float16" in name else torch.bfloat16
    base = {"head_dim": 128, "chunk_size": 64, "capacity_tokens": 4096}
    config = HybridAttentionConfig(**{**base, **LAYERS[name]})
    torch.manual_seed(0)
    table = tile.changed(launch.device_table(config, torch.device("cuda"), False), "attend", {"attend_programs": 0})
    launched: list[str] = []
    start = launcher.Launcher.start
    monkeypatch.setattr(
        launcher.Launcher, "start", lambda self, kernel, run: (launched.append(kernel), start(self, kernel, run))[1]
    )
    shape = (config.num_heads, config.projection_dim, config.head_dim)
    weights = [(torch.randn(shape, device="cuda") * config.head_dim**-0.5).to(dtype) for _ in "qk"]
    states = [HybridAttentionState.empty(config, 2, dtype, "cuda") for _ in range(2)]
    for tokens, counts in CALLS:
        packed = name == "packed"
        lead = (sum(counts),) if packed else (2, tokens)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
        query, key, value, gate = (torch.randn(*lead, n, config.head_dim, device="cuda").to(dtype) for n in heads)
        new = torch.tensor(counts, device="cuda")
        given = Inputs(
            query, key, value, gate.sigmoid() if config.gate == "channel" else None, *weights, None if packed else new
        )
        start_of = torch.cat([new.new_zeros(1), new.cumsum(0)])
        packing = Packing(start_of, torch.tensor([1, 0], device="cuda"), tokens) if packed else None
        outputs = []
        for state, own in zip(states, (None, table), strict=True):
            launched.clear()
            outputs.append(torch.full_like(query, float("nan")))
            launch.launch_hybrid_attention(given, config, state, outputs[-1], packing, own)
            assert ("attend_tma" in launched, "attend" in launched) == (own is None, own is not None)
            state.length.add_(new.flip(0) if packed else new)
        got, wanted = (x.double() for x in outputs)
        assert got.isfinite().all() and ((got - wanted).norm() / wanted.norm()).item() < 2 * NARROW_NORM
        for what, tensor in states[0].tensors().items():
            assert torch.equal(tensor, states[1].tensors()[what]), what


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "tma"])
@pytest.mark.parametrize("name", attend_cases.CASES)
def test_attend(name: str, kernel: str) -> None:
    if kernel == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is of sm_90")
    check(attend_cases.run_case(name, kernel), getattr(torch, attend_cases.CASES[name].dtype))
