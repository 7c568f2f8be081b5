"""scan and linear for sm_90 against their meaning in float64: in threads on the CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import NARROW_NORM

pytest.importorskip("triton")

from still_kernels.hybrid_attention.plan.tiles import tile_table
from still_kernels.hybrid_attention.sm90 import gluon_linear, gluon_scan
from still_kernels.launcher import descriptor
from tests.still_kernels import gluon_interpreter

C = 64
UNWRITTEN = 77.0


@dataclass(frozen=True)
class Case:
    """B rows with `lengths` tokens before the call and `counts` new ones; chunks first ... + n of a segment."""

    lengths: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = (300,)
    first: int = 0
    chunks: int | None = None
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128
    rows: int = 128
    dtype: str = "bfloat16"
    shared: bool = False  # one projection for all heads
    packed: bool = False
    unpacked: bool = False  # the ring is that of the call, of a state in 8 bits
    feature_map: str = "np_softmax_pm"
    programs: int = 3
    scale: float = 1.0


RAGGED: dict[str, Any] = {"lengths": (0, 70, 1000, 4111), "counts": (300, 0, 129, 65)}
CASES = {
    "from nothing": Case(),
    "ragged": Case(**RAGGED),
    "one program": Case(**RAGGED, programs=1),
    "packed, many programs": Case(**RAGGED, packed=True, programs=40),
    "odd chunk": Case((192,), (300,), kv_heads=4),
    "second segment": Case((70, 0), (1000, 513), first=4, chunks=4),
    "ring, odd": Case((70, 130), (300, 333), chunks=5, packed=True),
    "last segment, odd": Case((70, 0), (700, 513), first=8, chunks=3, packed=True),
    "float16": Case(**RAGGED, dtype="float16"),
    "ring, unpacked": Case((70, 130), (300, 333), packed=True, unpacked=True),
    "one projection, softmax_pm": Case(**RAGGED, shared=True, feature_map="softmax_pm"),
    "head size 64": Case(**RAGGED, dim=64, rows=64, heads=3, kv_heads=1),
    "head size 64, features of 128": Case((500,), (300,), dim=64),
    "features of 64": Case((500,), (300,), rows=64),
    "large queries": Case((64,), (300,), scale=30.0),
}


def call(case: Case, device: str) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    """The kernel's arguments by name; linear and its sum as they should be, NaN where nothing is promised; what nobody may write."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, case.dtype)
    heads, dim, rows = case.heads, case.dim, case.rows
    B, T = len(case.counts), max(case.counts)
    n = case.chunks or (T + C - 2) // C + 1
    starts = [sum(case.counts[:b]) if case.packed else b * T for b in range(B)]
    tokens = sum(case.counts) if case.packed else B * T
    state_rows = [2 * b + 1 for b in reversed(range(B))] if case.packed else list(range(B))
    groups = (n + 1) // 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    query, value = (
        torch.full((tokens, h, dim), float("nan"), device=device, dtype=dtype) for h in (heads, case.kv_heads)
    )
    ring = torch.full((2 * B + 1, case.kv_heads, 2 * C, dim), float("nan"), device=device, dtype=dtype)
    weight = (normal(1 if case.shared else heads, rows, dim) * dim**-0.5).to(dtype)
    phi_k = torch.full((B, n, heads, C, 2 * rows), float("nan"), device=device, dtype=torch.bfloat16)
    kv, z = normal(B, groups, heads, 2 * rows, dim).bfloat16(), normal(B, groups, heads, 2 * rows).abs()
    linear = torch.full((B * n * heads * C, dim), UNWRITTEN, device=device, dtype=torch.bfloat16)
    linear_sum = torch.full((B * n * heads * C + 256,), UNWRITTEN, device=device)
    wanted = torch.full((B, n, heads, C, dim), float("nan"), device=device, dtype=torch.float64)
    wanted_sum = wanted[..., 0].clone()
    free = torch.ones(B, n, dtype=torch.bool, device=device)
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        row, start, end = state_rows[b], starts[b], length + count
        query[start : start + count] = (normal(count, heads, dim) * case.scale).to(dtype)
        value[start : start + count] = normal(count, case.kv_heads, dim).to(dtype)
        old = torch.arange(max(0, length - 2 * C), length, device=device)
        ring[row][:, old % (2 * C)] = normal(case.kv_heads, len(old), dim).to(dtype)
        known = torch.full((end, case.kv_heads, dim), float("nan"), device=device, dtype=torch.float64)
        known[old] = ring[row][:, old % (2 * C)].transpose(0, 1).double()
        known[length:] = value[start : start + count].double()
        for i in range(n):
            chunk = length // C + case.first + i
            if count == 0 or chunk * C >= end:
                continue
            free[b, i] = False
            if chunk < 2:
                continue
            if chunk * C >= length:
                keys = normal(heads, C, 2 * rows).softmax(-1)
                keys[:, ::5] = 0
                phi_k[b, i] = keys.bfloat16()
            some = slice(max(length - chunk * C, 0), min(end - chunk * C, C))
            q = (
                query[start + chunk * C + some.start - length : start + chunk * C + some.stop - length]
                .double()
                .transpose(0, 1)
            )
            x = q @ weight.double().transpose(1, 2)
            if case.feature_map == "np_softmax_pm":
                x = x * q.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)
            phi = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
            out = phi @ kv[b, i // 2].double()
            total = (phi @ z[b, i // 2].double()[..., None])[..., 0]
            if i % 2 == 1 and chunk * C >= length:
                pair = phi @ phi_k[b, i].double().transpose(1, 2)
                total = total + pair.sum(-1)
                v = (
                    known[(chunk - 2) * C : (chunk - 1) * C]
                    .transpose(0, 1)
                    .repeat_interleave(heads // case.kv_heads, 0)
                )
                out = out + pair @ v
            wanted[b, i, :, some], wanted_sum[b, i, :, some] = out, total
    counts = torch.int32 if case.packed else torch.int64
    lengths = torch.zeros(2 * B + 1, dtype=counts, device=device)
    lengths[state_rows] = torch.tensor(case.lengths, dtype=counts, device=device)
    tensors = {
        "query": query.view(tokens, -1),
        "value": value.view(tokens, -1),
        "feature_q_weight": weight.view(-1, dim),
        "phi_k": phi_k.view(-1, 2 * rows),
        "prefix_kv": kv.view(-1, dim),
        "linear": linear,
        "ring_value": ring[state_rows].contiguous() if case.unpacked else ring,
        "past_length": lengths,
        "prefix_z": z,
        "linear_sum": linear_sum,
        "new_tokens": None if case.packed else torch.tensor(case.counts, device=device),
        "query_start": torch.tensor([*starts, tokens], dtype=counts, device=device) if case.packed else None,
        "state_row": torch.tensor(state_rows, dtype=counts, device=device) if case.packed else None,
    }
    numbers = {
        **{
            "B": B,
            "T": T,
            "H": heads,
            "HK": case.kv_heads,
            "W_HEADS": weight.shape[0],
            "first_tile": case.first,
            "n_tiles": n,
        },
        **{"C": C, "D": dim, "P": rows, "FEATURE": int(case.feature_map == "softmax_pm"), "RAGGED": int(case.packed)},
        "CODES": int(case.unpacked),
    }
    blocks = tile_table(90, dim, C, rows, False).tiles["linear_tma"].blocks
    return laid_out(gluon_linear.linear_tma_kernel, tensors, numbers, blocks, device), wanted, wanted_sum, free


def laid_out(kernel: Any, tensors: dict[str, Any], numbers: dict[str, int], blocks: Any, device: str) -> dict[str, Any]:
    """Arguments of a kernel by name."""
    arguments: dict[str, Any] = {}
    for name in kernel.arg_names:
        plain = name[2:]
        if not name.startswith("d_"):
            arguments[name] = tensors[plain] if name.startswith("p_") else numbers[name]
        elif device == "cpu":
            arguments[name] = gluon_interpreter.Descriptor(tensors[plain], blocks[plain])
        else:
            shape = tuple(tensors[plain].shape)
            arguments[name] = descriptor(kernel, tensors[plain], shape, blocks[plain], tensors[plain])
    return arguments


def check(case: Case, device: str, repeats: int = 1) -> None:
    """What is promised is right and the same in every run, nothing beside the segment's tiles is written."""
    arguments, wanted, wanted_sum, free = call(case, device)
    kernel, seen = gluon_linear.linear_tma_kernel, []
    linear = arguments["p_linear_sum"].new_empty(0)
    for _ in range(repeats):
        if device == "cpu":
            gluon_interpreter.run(kernel, case.programs, arguments)
            linear = arguments["d_linear"].tensor
        else:
            kernel[(case.programs,)](**arguments, num_warps=4)
            linear = arguments["d_linear"].base
        seen.append((linear.clone(), arguments["p_linear_sum"].clone()))
    for got, again in zip(*seen[:: len(seen) - 1], strict=True) if repeats > 1 else ():
        assert torch.equal(got.nan_to_num(), again.nan_to_num())
    out, total = seen[0][0].view(wanted.shape), seen[0][1]
    assert (total[-256:] == UNWRITTEN).all(), "outside"
    total = total[:-256].view(wanted_sum.shape)
    for got, right in ((out, wanted), (total, wanted_sum)):
        promised = right.isfinite()
        difference = torch.where(promised, got.double(), 0) - torch.where(promised, right, 0)
        assert difference.norm() <= NARROW_NORM * right.nan_to_num().norm(), "wrong"
        assert promised.any()
    missing = free[:, :, None, None].expand(total.shape)
    # a chunk behind the row's end may be written where its tile has another one
    missing = (
        missing
        & free.roll(1, 1)[:, :, None, None]
        & (torch.arange(free.shape[1], device=free.device) % 2 == 0)[None, :, None, None]
    )
    assert (total[missing] == UNWRITTEN).all() and (out[missing] == UNWRITTEN).all(), "outside"


def scan_call(case: Case, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same of scan: arguments by name, and what is left, NaN where nothing is promised."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, case.dtype)
    heads, dim, F = case.heads, case.dim, 2 * case.rows
    B, T = len(case.counts), max(case.counts)
    n = case.chunks or (T + C - 2) // C + 1
    starts = [sum(case.counts[:b]) if case.packed else b * T for b in range(B)]
    tokens = sum(case.counts) if case.packed else B * T
    state_rows = [2 * b + 1 for b in reversed(range(B))] if case.packed else list(range(B))
    groups = (n + 1) // 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    value = torch.full((tokens, case.kv_heads, dim), float("nan"), device=device, dtype=dtype)
    ring = torch.full((2 * B + 1, case.kv_heads, 2 * C, dim), float("nan"), device=device, dtype=dtype)
    phi_k = torch.full((B, n, heads, C, F), float("nan"), device=device, dtype=torch.bfloat16)
    kv, z = normal(2 * B + 1, heads, F, dim), normal(2 * B + 1, heads, F).abs()
    wanted = {"kv_state": kv.double(), "z_state": z.double()}
    wanted["prefix_kv"] = torch.full((B, groups, heads, F, dim), float("nan"), device=device, dtype=torch.float64)
    wanted["prefix_z"] = wanted["prefix_kv"][..., 0].clone()
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        row, start, end = state_rows[b], starts[b], length + count
        value[start : start + count] = normal(count, case.kv_heads, dim).to(dtype)
        old = torch.arange(max(0, length - 2 * C), length, device=device)
        ring[row][:, old % (2 * C)] = normal(case.kv_heads, len(old), dim).to(dtype)
        known = torch.full((end, case.kv_heads, dim), float("nan"), device=device, dtype=torch.float64)
        known[old] = ring[row][:, old % (2 * C)].transpose(0, 1).double()
        known[length:] = value[start : start + count].double()
        for i in range(n):
            chunk = length // C + case.first + i
            if count == 0 or chunk * C >= end:
                continue
            if chunk >= 2 and chunk * C >= length:
                phi_k[b, i] = normal(heads, C, F).softmax(-1).bfloat16()
                v = (
                    known[(chunk - 2) * C : (chunk - 1) * C]
                    .transpose(0, 1)
                    .repeat_interleave(heads // case.kv_heads, 0)
                )
                wanted["kv_state"][row] += phi_k[b, i].double().transpose(1, 2) @ v
                wanted["z_state"][row] += phi_k[b, i].double().sum(1)
            if i % 2 == 0:
                wanted["prefix_kv"][b, i // 2], wanted["prefix_z"][b, i // 2] = (
                    wanted["kv_state"][row],
                    wanted["z_state"][row],
                )
    counts = torch.int32 if case.packed else torch.int64
    lengths = torch.zeros(2 * B + 1, dtype=counts, device=device)
    lengths[state_rows] = torch.tensor(case.lengths, dtype=counts, device=device)
    tensors = {
        "value": value.view(tokens, -1),
        "phi_k": phi_k.view(-1, F),
        "prefix_kv": torch.full((B * groups * heads * F, dim), UNWRITTEN, device=device, dtype=torch.bfloat16),
        "prefix_z": torch.full((B, groups, heads, F), UNWRITTEN, device=device),
        "ring_value": ring[state_rows].contiguous() if case.unpacked else ring,
        "kv_state": kv,
        "z_state": z,
        "past_length": lengths,
        "new_tokens": None if case.packed else torch.tensor(case.counts, device=device),
        "query_start": torch.tensor([*starts, tokens], dtype=counts, device=device) if case.packed else None,
        "state_row": torch.tensor(state_rows, dtype=counts, device=device) if case.packed else None,
    }
    tile = tile_table(90, dim, C, case.rows, False).tiles["scan_tma"]
    numbers = {
        **{"T": T, "H": heads, "HK": case.kv_heads, "first_tile": case.first, "n_tiles": n},
        **{"C": C, "D": dim, "F": F, "RAGGED": int(case.packed), **tile.constants},
        "CODES": int(case.unpacked),
    }
    return laid_out(gluon_scan.scan_tma_kernel, tensors, numbers, tile.blocks, device), wanted


def check_scan(case: Case, device: str, repeats: int = 1) -> None:
    """States and what is stored on the way, the same in every run; nothing else is written."""
    grid = (2 * case.rows // 128 * (case.dim // 64), case.heads, len(case.counts))
    seen = []
    for _ in range(repeats):
        arguments, wanted = scan_call(case, device)
        if device == "cpu":
            gluon_interpreter.run(gluon_scan.scan_tma_kernel, grid, arguments)
        else:
            gluon_scan.scan_tma_kernel[grid](**arguments, num_warps=4)
        prefix = arguments["d_prefix_kv"]
        seen.append({name: arguments[f"p_{name}"] for name in ("kv_state", "z_state", "prefix_z")})
        seen[-1]["prefix_kv"] = prefix.tensor if device == "cpu" else prefix.base
    for name, right in wanted.items():
        assert all(torch.equal(seen[0][name], other[name]) for other in seen[1:])
        got, promised = seen[0][name].view(right.shape), right.isfinite()
        assert promised.any() and (got[~promised] == UNWRITTEN).all(), "outside"
        difference = torch.where(promised, got.double(), 0) - right.nan_to_num()
        limit = NARROW_NORM if name == "prefix_kv" or case.dtype == "float16" else 1e-6
        assert difference.norm() <= limit * right.nan_to_num().norm(), "wrong"


@pytest.mark.parametrize("name", CASES)
def test_in_threads(name: str) -> None:
    check(CASES[name], "cpu")


@pytest.mark.parametrize("name", CASES)
def test_scan_in_threads(name: str) -> None:
    check_scan(CASES[name], "cpu")


@pytest.mark.parametrize(
    ("text", "instead", "why"),
    [
        ("mbarrier.wait(bars.q_empty.index(g), phase)", "pass", "changed|arrivals|wrong|waits for"),
        ("mbarrier.arrive(bars.v_empty, count=1)\n", "\n", "waits for"),
        ("(2 * group + GROUP < n.n_tiles)", "(2 * group + GROUP <= n.n_tiles)", "outside|wrong"),
        ("mbarrier.wait(bars.s_full.index(1), number & 1)", "pass", "changed|wrong|arrivals|waits for"),
        ("(projections - 1) & 1", "projections & 1", "waits for|wrong|changed"),
    ],
    ids=lambda text: text[:40],
)
def test_the_threads_find_what_is_wrong(
    text: str, instead: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one place changed. What only saves a copy that is written over, or a product that nobody stores, is not here."""
    monkeypatch.setattr(gluon_interpreter, "PATIENCE_S", 1.0)
    source = Path(gluon_linear.__file__).read_text()
    assert source.count(text) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(source.replace(text, instead))
    found = gluon_interpreter.interpreted(changed)
    monkeypatch.setattr(gluon_interpreter, "interpreted", lambda path: found)
    with pytest.raises((AssertionError, IndexError, gluon_interpreter.Stuck), match=why):
        for seed in range(3):  # a wait that is missing shows where a copy comes late
            check(dataclasses.replace(CASES["ring, odd"], counts=(300, 333 + seed)), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("what", [check, check_scan])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, what: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is of sm_90")
    for programs in (1, 132):
        what(dataclasses.replace(CASES[name], programs=programs), "cuda", repeats=3)
