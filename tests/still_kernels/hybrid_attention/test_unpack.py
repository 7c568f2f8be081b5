"""Codes of a state as numbers for the kernels that copy by TMA: in Triton's interpreter, and whole calls on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import NARROW_NORM

pytest.importorskip("triton")

from still_kernels import codes, launcher, tile
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.plan import KERNELS, Variant
from still_kernels.packing import Packing
from tests.still_kernels.interpreted import run_cases

C, UNWRITTEN = 64, 77.0
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packed": True},
    "group": {"select_heads": 2, "dim": 128},
    "few slots": {"slots": 5},
    "no slots": {"slots": 0},
}


def run_case(
    device: str,
    packed: bool = False,
    select_heads: int = 4,
    dim: int = 64,
    slots: int = 70,
    kv_heads: int = 2,
    salient: int = 3,
) -> int:
    """Numbers that are not what the rule says, and those that were written and are not seen; rows of three lengths, one without tokens."""
    from still_kernels.hybrid_attention.prefill.triton_unpack import unpack_kernel

    past, counts, rows = (200, 1030, 90), (100, 230, 0), (4, 0, 2) if packed else (0, 1, 2)
    generator = torch.Generator(device).manual_seed(0)
    held, numbers = {}, {}
    for name, heads, length in (("window", kv_heads, 2 * C), ("salient", select_heads, slots)):
        for kind in ("key", "value"):
            x = torch.randn(6 if packed else 3, heads, length, dim, device=device, generator=generator)
            words, scale = codes.quantized(x)
            held |= {f"{name}_{kind}": words.view(torch.int8), f"{name}_{kind}_scale": scale}
            numbers[f"{name}_{kind}"] = codes.dequantized(words, scale, torch.float32)[list(rows)]
    lengths = torch.zeros(6 if packed else 3, dtype=torch.int64, device=device)
    lengths[list(rows)] = torch.tensor(past, device=device)
    written = {
        made: torch.full_like(numbers[f"{of}_{kind}"], UNWRITTEN)
        for of, name in (("window", "ring"), ("salient", "cached"))
        for kind in ("key", "value")
        for made in [f"{name}_{kind}"]
    }
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    given = {
        **held,
        **written,
        "past_length": lengths,
        "new_tokens": None if packed else torch.tensor(counts, device=device),
        "query_start": torch.tensor(starts, device=device) if packed else None,
        "state_row": torch.tensor(rows, device=device) if packed else None,
    }
    known = {
        "T": max(counts),
        "HK": kv_heads,
        "HS": select_heads,
        "K": salient,
        "N": slots,
        "C": C,
        "D": dim,
        "DP": dim,
        "RB": 32,
    }
    known["RAGGED"] = int(packed)
    arguments = {n: given[n[2:]] if n.startswith("p_") else known[n] for n in unpack_kernel.arg_names}
    unpack_kernel[(-(-slots // 32) + 2 * C // 32, select_heads, 3)](**arguments)
    wrong = 0
    for b, (length, count) in enumerate(zip(past, counts, strict=True)):
        filled = min(slots, salient * max((length + count - 1) // C - 1, 0)) if count else 0
        for kind in ("key", "value"):
            ring, cache = written[f"ring_{kind}"][b], written[f"cached_{kind}"][b]
            wrong += int((ring != (numbers[f"window_{kind}"][b] if count else UNWRITTEN)).sum())
            wrong += int((cache[:, :filled] != numbers[f"salient_{kind}"][b, :, :filled]).sum())
            wrong += int((cache[:, filled:] != UNWRITTEN).sum())
    return wrong


def test_in_the_interpreter() -> None:
    assert run_cases(Path(__file__)) == dict.fromkeys(CASES, 0)


def test_only_tma_kernels_of_states_in_8_bits_want_it() -> None:
    with_codes, without = (KERNELS.build(Variant(cache=cache), 90) for cache in ("int8", "float"))
    assert "unpack" in with_codes.tiles and with_codes.plan_constants["unpack_rows"] > 0
    assert "unpack" not in without.tiles and without.plan_constants["unpack_rows"] == 0
    folding = KERNELS.build(Variant(cache="int8", overflow="fold_oldest"), 90)
    assert "unpack" not in folding.tiles and "attend" in folding.tiles


CALLS = ((700, [700, 333]), (64, [0, 64]), (2, [2, 1]), (1500, [129, 1500]))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dim", "scope", "dtype"), [(128, "q_head", torch.bfloat16), (64, "kv_group_max", torch.float16)]
)
def test_calls_agree_whichever_kernels_they_take(packed: bool, dim: int, scope: str, dtype: torch.dtype) -> None:
    """The kernels that copy by TMA beside those that read codes."""
    config = HybridAttentionConfig(
        num_heads=8, num_kv_heads=2, head_dim=dim, chunk_size=C, capacity_tokens=4096, select_scope=scope, cache="int8"
    )
    torch.manual_seed(0)
    whole = launch.device_table(config, torch.device("cuda"), False)
    table = tile.changed(whole, "attend", {"attend_programs": 0, "linear_programs": 0, "scan_tma": 0})
    weights = [(torch.randn(8, dim, dim, device="cuda") * dim**-0.5).to(dtype) for _ in "qk"]
    states = [HybridAttentionState.empty(config, 2, dtype, "cuda") for _ in range(2)]
    launched: list[str] = []
    start = launcher.Launcher.start
    patch = pytest.MonkeyPatch()
    patch.setattr(
        launcher.Launcher, "start", lambda self, kernel, run: (launched.append(kernel), start(self, kernel, run))[1]
    )
    for tokens, counts in CALLS:
        lead = (sum(counts),) if packed else (2, tokens)
        query, key, value, gate = (torch.randn(*lead, n, dim, device="cuda").to(dtype) for n in (8, 2, 2, 8))
        new = torch.tensor(counts, device="cuda")
        given = Inputs(query, key, value, gate.sigmoid(), *weights, None if packed else new)
        start_of = torch.cat([new.new_zeros(1), new.cumsum(0)])
        packing = Packing(start_of, torch.tensor([1, 0], device="cuda"), tokens) if packed else None
        outputs: list[Tensor] = []
        for state, own in zip(states, (None, table), strict=True):
            launched.clear()
            outputs.append(torch.full_like(query, float("nan")))
            launch.launch_hybrid_attention(given, config, state, outputs[-1], packing, own)
            assert {"unpack", "scan_tma", "linear_tma", "attend_tma"} <= set(launched) or own is not None
            assert "unpack" not in launched or own is None
            state.length.add_(new.flip(0) if packed else new)
        got, wanted = (x.double() for x in outputs)
        assert got.isfinite().all() and ((got - wanted).norm() / wanted.norm()).item() < 2 * NARROW_NORM
        for name, tensor in states[0].tensors().items():
            other = states[1].tensors()[name]
            if name in ("kv_state", "z_state"):
                assert ((tensor - other).norm() / other.norm().clamp_min(1)).item() < 1e-5, name
            else:
                assert torch.equal(tensor, other), name
    patch.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    assert run_case("cuda", **CASES[name]) == 0


if __name__ == "__main__":
    from tests.still_kernels import quick_interpreter

    quick_interpreter.install()
    print(json.dumps({name: run_case("cpu", **CASES[name]) for name in sys.argv[1:] or CASES}))
