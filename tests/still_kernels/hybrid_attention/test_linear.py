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


class Given:
    """What both kernels are given in a case: tokens and the ring NaN where nothing is promised."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(1)
        self.dtype = getattr(torch, case.dtype)
        self.B, self.T = len(case.counts), max(case.counts)
        self.n = case.chunks or (self.T + C - 2) // C + 1
        self.groups = (self.n + 1) // 2
        self.starts = [sum(case.counts[:b]) if case.packed else b * self.T for b in range(self.B)]
        self.tokens = sum(case.counts) if case.packed else self.B * self.T
        self.state_rows = [2 * b + 1 for b in reversed(range(self.B))] if case.packed else list(range(self.B))
        self.value = self.filled(self.tokens, case.kv_heads, case.dim, dtype=self.dtype)
        self.ring = self.filled(2 * self.B + 1, case.kv_heads, 2 * C, case.dim, dtype=self.dtype)
        self.phi_k = self.filled(self.B, self.n, case.heads, C, 2 * case.rows, dtype=torch.bfloat16)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def filled(self, *shape: int, value: float = float("nan"), dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, device=self.device, dtype=dtype)

    def known_values(self, b: int) -> Tensor:
        """Draw the values of row b; all that are known, [tokens, kv_heads, dim] in float64."""
        case, ring = self.case, self.ring[self.state_rows[b]]
        length, count, start = case.lengths[b], case.counts[b], self.starts[b]
        self.value[start : start + count] = self.normal(count, case.kv_heads, case.dim).to(self.dtype)
        old = torch.arange(max(0, length - 2 * C), length, device=self.device)
        ring[:, old % (2 * C)] = self.normal(case.kv_heads, len(old), case.dim).to(self.dtype)
        known = self.filled(length + count, case.kv_heads, case.dim, dtype=torch.float64)
        known[old] = ring[:, old % (2 * C)].transpose(0, 1).double()
        known[length:] = self.value[start : start + count].double()
        return known

    def chunks(self, b: int) -> list[tuple[int, int]]:
        """Chunks of row b that the segment has, by their places in it."""
        length, count = self.case.lengths[b], self.case.counts[b]
        places = [(i, length // C + self.case.first + i) for i in range(self.n)]
        return [(i, chunk) for i, chunk in places if count and chunk * C < length + count]

    def promoted(self, known: Tensor, chunk: int) -> Tensor:
        """Values of the tokens that this chunk promotes, by query heads."""
        values = known[(chunk - 2) * C : (chunk - 1) * C].transpose(0, 1)
        return values.repeat_interleave(self.case.heads // self.case.kv_heads, 0)

    def arguments(self, kernel: Any, tensors: dict[str, Any], numbers: dict[str, int], blocks: Any) -> dict[str, Any]:
        """Of `kernel` by name; `tensors` and `numbers` beside those that both kernels have."""
        case, device = self.case, self.device
        kind = torch.int32 if case.packed else torch.int64
        lengths = torch.zeros(2 * self.B + 1, dtype=kind, device=device)
        lengths[self.state_rows] = torch.tensor(case.lengths, dtype=kind, device=device)
        query_start = torch.tensor([*self.starts, self.tokens], dtype=kind, device=device)
        tensors |= {
            "value": self.value.view(self.tokens, -1),
            "phi_k": self.phi_k.view(-1, 2 * case.rows),
            "ring_value": self.ring[self.state_rows].contiguous() if case.unpacked else self.ring,
            "past_length": lengths,
            "new_tokens": None if case.packed else torch.tensor(case.counts, device=device),
            "query_start": query_start if case.packed else None,
            "state_row": torch.tensor(self.state_rows, dtype=kind, device=device) if case.packed else None,
        }
        numbers |= {"T": self.T, "H": case.heads, "HK": case.kv_heads, "first_tile": case.first, "n_tiles": self.n}
        numbers |= {"C": C, "D": case.dim, "RAGGED": int(case.packed), "CODES": int(case.unpacked)}
        return laid_out(kernel, tensors, numbers, blocks, device)


def call(case: Case, device: str) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    """The kernel's arguments by name; linear and its sum as they should be, NaN where nothing is promised; what nobody may write."""
    given = Given(case, device)
    heads, dim, rows, B, n = case.heads, case.dim, case.rows, given.B, given.n
    query = given.filled(given.tokens, heads, dim, dtype=given.dtype)
    weight = (given.normal(1 if case.shared else heads, rows, dim) * dim**-0.5).to(given.dtype)
    kv, z = (
        given.normal(B, given.groups, heads, 2 * rows, dim).bfloat16(),
        given.normal(B, given.groups, heads, 2 * rows).abs(),
    )
    wanted = given.filled(B, n, heads, C, dim, dtype=torch.float64)
    wanted_sum = wanted[..., 0].clone()
    free = torch.ones(B, n, dtype=torch.bool, device=device)
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        start, end = given.starts[b], length + count
        query[start : start + count] = (given.normal(count, heads, dim) * case.scale).to(given.dtype)
        known = given.known_values(b)
        for i, chunk in given.chunks(b):
            free[b, i] = False
            if chunk < 2:
                continue
            if chunk * C >= length:
                keys = given.normal(heads, C, 2 * rows).softmax(-1)
                keys[:, ::5] = 0
                given.phi_k[b, i] = keys.bfloat16()
            some = slice(max(length - chunk * C, 0), min(end - chunk * C, C))
            first = start + chunk * C - length
            q = query[first + some.start : first + some.stop].double().transpose(0, 1)
            x = q @ weight.double().transpose(1, 2)
            if case.feature_map == "np_softmax_pm":
                x = x * q.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)
            phi = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
            out = phi @ kv[b, i // 2].double()
            total = (phi @ z[b, i // 2].double()[..., None])[..., 0]
            if i % 2 == 1 and chunk * C >= length:
                pair = phi @ given.phi_k[b, i].double().transpose(1, 2)
                total = total + pair.sum(-1)
                out = out + pair @ given.promoted(known, chunk)
            wanted[b, i, :, some], wanted_sum[b, i, :, some] = out, total
    tensors = {
        "query": query.view(given.tokens, -1),
        "feature_q_weight": weight.view(-1, dim),
        "prefix_kv": kv.view(-1, dim),
        "linear": given.filled(B * n * heads * C, dim, value=UNWRITTEN, dtype=torch.bfloat16),
        "prefix_z": z,
        "linear_sum": given.filled(B * n * heads * C + 256, value=UNWRITTEN),
    }
    numbers = {"B": B, "W_HEADS": weight.shape[0], "P": rows, "FEATURE": int(case.feature_map == "softmax_pm")}
    blocks = tile_table(90, dim, C, rows, False).tiles["linear_tma"].blocks
    return given.arguments(gluon_linear.linear_tma_kernel, tensors, numbers, blocks), wanted, wanted_sum, free


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
    given = Given(case, device)
    heads, dim, F, B = case.heads, case.dim, 2 * case.rows, given.B
    kv, z = given.normal(2 * B + 1, heads, F, dim), given.normal(2 * B + 1, heads, F).abs()
    wanted = {"kv_state": kv.double(), "z_state": z.double()}
    wanted["prefix_kv"] = given.filled(B, given.groups, heads, F, dim, dtype=torch.float64)
    wanted["prefix_z"] = wanted["prefix_kv"][..., 0].clone()
    for b, length in enumerate(case.lengths):
        row, known = given.state_rows[b], given.known_values(b)
        for i, chunk in given.chunks(b):
            if chunk >= 2 and chunk * C >= length:
                keys = given.phi_k[b, i] = given.normal(heads, C, F).softmax(-1).bfloat16()
                wanted["kv_state"][row] += keys.double().transpose(1, 2) @ given.promoted(known, chunk)
                wanted["z_state"][row] += keys.double().sum(1)
            if i % 2 == 0:
                wanted["prefix_kv"][b, i // 2] = wanted["kv_state"][row]
                wanted["prefix_z"][b, i // 2] = wanted["z_state"][row]
    tensors = {
        "prefix_kv": given.filled(B * given.groups * heads * F, dim, value=UNWRITTEN, dtype=torch.bfloat16),
        "prefix_z": given.filled(B, given.groups, heads, F, value=UNWRITTEN),
        "kv_state": kv,
        "z_state": z,
    }
    tile = tile_table(90, dim, C, case.rows, False).tiles["scan_tma"]
    numbers = {"F": F, **tile.constants}
    return given.arguments(gluon_scan.scan_tma_kernel, tensors, numbers, tile.blocks), wanted


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
