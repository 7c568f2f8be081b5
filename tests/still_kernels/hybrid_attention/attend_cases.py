"""Cases of attend alone, the last step but one of prefill: states and parts that the steps before it would leave are random numbers, and
NaN where these leave nothing. As a program (KERNEL CASE ...): run them, print the errors as JSON; KERNEL is triton or tma.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.paged import _scatter
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION

C = 64
GUARD = 4096  # elements on both sides of the output
UNWRITTEN = 77.0
PROGRAMS = 132


@dataclass(frozen=True)
class Case:
    """A call of B rows with `lengths` tokens before it and `counts` new ones.

    tokens: T; the most of counts by default. slots: N; what the rows need by default. segment: Chunks of a launch.
    scale: Of keys. programs: That share the tiles, of the kernel that stays for several.
    """

    lengths: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = (300,)
    tokens: int | None = None
    heads: int = 4
    kv_heads: int = 2
    group: bool = False
    salient: int = 4
    slots: int | None = None
    dim: int = 128
    dtype: str = "bfloat16"
    gate: bool = True
    factor: bool = False
    phantom: bool = False
    packed: bool = False
    paged: bool = False  # packed, and the states in pages of an engine
    unpacked: bool = False  # ring and cache are those of the call, of a state in 8 bits
    segment: int = 256
    scale: float = 1.0
    programs: int = PROGRAMS


RAGGED: dict[str, Any] = {"lengths": (0, 70, 1000, 4111), "counts": (300, 0, 129, 65)}
CASES = {
    "whole tiles": Case(counts=(512,)),
    "part of a tile": Case(counts=(300,)),
    "one chunk": Case(counts=(64,)),
    "two tokens": Case(counts=(2,)),
    "one tile and a token": Case(counts=(129,)),
    "past, few": Case((70,), (200,)),
    "past, whole chunks": Case((128,), (256,)),
    "past, odd chunk": Case((192,), (300,)),
    "past, several blocks": Case((9000,), (700,), heads=2, kv_heads=1),
    "past, no tile complete": Case((4111,), (50,)),
    "ragged": Case(**RAGGED),
    "ragged, padded": Case(**RAGGED, tokens=400),
    "ragged, one program": Case(**RAGGED, programs=1),
    "ragged, three programs": Case(**RAGGED, programs=3),
    "packed": Case(**RAGGED, packed=True),
    "packed, three programs": Case(**RAGGED, packed=True, programs=3),
    "paged": Case(**RAGGED, packed=True, paged=True),
    "paged, several blocks": Case((9000, 70), (700, 300), heads=2, kv_heads=1, packed=True, paged=True, programs=3),
    "paged, group": Case(**RAGGED, dtype="float16", packed=True, paged=True, group=True, slots=400),
    "paged, head size 64": Case(**RAGGED, dim=64, packed=True, paged=True),
    "group": Case(**RAGGED, heads=8, group=True),
    "group of one": Case(**RAGGED, kv_heads=4),
    "nine heads": Case((0, 1000), (200, 333), heads=9, kv_heads=3),
    "twelve heads, seven programs": Case((0, 1000), (200, 333), heads=12, kv_heads=4, programs=7),
    "no gate, factor": Case(**RAGGED, gate=False, factor=True),
    "no gate": Case(counts=(333,), gate=False),
    "phantom": Case((0, 30), (200, 130), phantom=True),
    "beyond the capacity": Case((500,), (500,), slots=40),
    "no salient": Case((100,), (300,), salient=0),
    "three salient": Case((5000,), (900,), salient=3),
    "five salient": Case((2600,), (900,), salient=5),
    "all thirty-two": Case((700,), (900,), salient=32),
    "more slots than known": Case((700,), (900,), slots=1000),
    "segments": Case((70, 0), (1000, 513), segment=4),
    "segments, packed": Case((70, 0), (1000, 513), segment=6, packed=True, programs=5),
    "unpacked": Case(**RAGGED, packed=True, unpacked=True, programs=3),
    "large logits": Case((300,), (400,), scale=20.0),
    "float16": Case(**RAGGED, dtype="float16"),
    "float16, packed, group": Case(**RAGGED, dtype="float16", packed=True, group=True),
    "head size 64": Case(**RAGGED, dim=64),
    "head size 64, several blocks": Case((9000,), (700,), dim=64, salient=5),
    "head size 64, float16": Case((9000, 10), (700, 400), dim=64, dtype="float16", segment=4),
    "head size 64, no gate": Case(**RAGGED, dim=64, gate=False, packed=True),
    "many rows": Case(tuple(range(0, 800, 100)), (140,) * 8, heads=2, kv_heads=1),
    "long": Case((0,), (8192,), heads=8, kv_heads=2),
}


@dataclass
class Data:
    """Tensors by the kernels' names without p_, and the numbers of the call."""

    case: Case
    tensors: dict[str, Tensor | None]
    B: int
    T: int
    N: int
    starts: list[int]  # first token of each row among all
    rows: list[int]  # of the state
    pages: Pages | None = None
    paged: dict[str, Tensor] = field(default_factory=dict)  # what takes the place of tensors where states lie in pages

    @property
    def tiles(self) -> int:
        """Chunks that T new tokens touch at most."""
        return (self.T + C - 2) // C + 1


def make(case: Case, device: str) -> Data:
    """Inputs of a case: NaN in padding, in slots that were not written, in linear parts that nobody has."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, case.dtype)
    B, T = len(case.counts), case.tokens or max(case.counts)
    select = case.kv_heads if case.group else case.heads
    ends = [length + count for length, count in zip(case.lengths, case.counts, strict=True)]
    known = [case.salient * max((end - 1) // C - 1, 0) for end in ends]
    N = max(known) if case.slots is None else case.slots
    rows = [2 * b + 1 for b in reversed(range(B))] if case.packed else list(range(B))
    state_rows = 2 * B + 1 if case.packed else B
    starts = [sum(case.counts[:b]) if case.packed else b * T for b in range(B)]
    tokens = sum(case.counts) if case.packed else B * T

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def nan(shape: tuple[int, ...], kind: torch.dtype = dtype) -> Tensor:
        return torch.full(shape, float("nan"), device=device, dtype=kind)

    activations: dict[str, Tensor] = {}
    for name, heads in (("query", case.heads), ("key", case.kv_heads), ("value", case.kv_heads), ("gate", case.heads)):
        found = nan((tokens, heads, case.dim))
        for start, count in zip(starts, case.counts, strict=True):
            values = normal(count, heads, case.dim) * (case.scale if name == "key" else 1.0)
            found[start : start + count] = (values.sigmoid() if name == "gate" else values).to(dtype)
        activations[name] = found
    states = {name: nan((state_rows, case.kv_heads, 2 * C, case.dim)) for name in ("window_key", "window_value")}
    states |= {name: nan((state_rows, select, N, case.dim)) for name in ("salient_key", "salient_value")}
    for b, row in enumerate(rows):
        old = torch.arange(max(0, case.lengths[b] - 2 * C), case.lengths[b], device=device) % (2 * C)
        for name in ("window_key", "window_value"):
            states[name][row][:, old] = normal(case.kv_heads, len(old), case.dim).to(dtype)
        filled = min(known[b], N)
        for name in ("salient_key", "salient_value"):
            states[name][row][:, :filled] = normal(select, filled, case.dim).to(dtype)
    count_dtype = torch.int32 if case.packed else torch.int64
    lengths = torch.zeros(state_rows, dtype=count_dtype, device=device)
    lengths[rows] = torch.tensor(case.lengths, dtype=count_dtype, device=device)
    data = Data(case, {**activations, **states, "past_length": lengths}, B, T, N, starts, rows)
    linear = nan((B, data.tiles, case.heads, C, case.dim), torch.bfloat16)
    linear_sum = nan((B, data.tiles, case.heads, C), torch.float32)
    for b, (length, end) in enumerate(zip(case.lengths, ends, strict=True)):
        for chunk in range(max(2, length // C), (end - 1) // C + 1):
            some = slice(max(length - chunk * C, 0), min(end - chunk * C, C))
            size = some.stop - some.start
            linear[b, chunk - length // C, :, some] = normal(case.heads, size, case.dim).bfloat16()
            linear_sum[b, chunk - length // C, :, some] = normal(case.heads, size).abs() * 3
    counts = torch.tensor(case.counts, dtype=count_dtype, device=device)
    data.tensors |= {
        "gate": activations["gate"] if case.gate else None,
        "window_factor": torch.rand(case.heads, device=device, generator=generator) + 0.5 if case.factor else None,
        "new_tokens": None if case.packed else counts,
        "query_start": torch.tensor([*starts, tokens], dtype=count_dtype, device=device) if case.packed else None,
        "state_row": torch.tensor(rows, dtype=count_dtype, device=device) if case.packed else None,
        "page_bytes": None,
        "linear": linear,
        "linear_sum": linear_sum,
    }
    if case.paged:
        _lay_in_pages(data)
    return data


def _lay_in_pages(data: Data) -> None:
    """The rows' states in pages in some order, NaN beside them; the first page is nobody's."""
    case, device = data.case, data.tensors["query"].device  # type: ignore[union-attr]
    scope = "kv_group_max" if case.group else "q_head"
    config = HybridAttentionConfig(
        case.heads, case.kv_heads, case.dim, select_scope=scope, salient_per_chunk=case.salient
    )
    kind = getattr(torch, case.dtype)
    data.pages = pages = Pages.of(config, data.N, kind)
    memory = torch.full(
        (2 + data.B * pages.columns, pages.size_bytes // 2), float("nan"), dtype=torch.float16, device=device
    )
    views = pages.views(memory.view(torch.int8))
    order = torch.randperm(data.B * pages.columns, generator=torch.Generator().manual_seed(2)).to(device) + 1
    table = order.view(data.B, pages.columns).int()
    for name in ("window_key", "window_value", "salient_key", "salient_value"):
        tensor = data.tensors[name]
        assert tensor is not None
        _scatter(
            name, tensor[data.rows], views[name], table.long(), pages, torch.full((data.B,), data.N, device=device)
        )
        data.paged[name] = views[name]
    data.paged["state_row"] = table
    data.paged["past_length"] = data.tensors["past_length"][data.rows]  # type: ignore[index]


def expected(data: Data) -> Tensor:
    """What attend means, in float64: [tokens, H, D]; zeros in padding."""
    case, x = data.case, data.tensors
    query, key, value = (x[name].double() for name in ("query", "key", "value"))  # type: ignore[union-attr]
    out = torch.zeros_like(query)
    epsilon = 1e-6
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        if count == 0:
            continue
        end, row, start = length + count, data.rows[b], data.starts[b]
        position = torch.arange(length, end, device=out.device)
        first = max(length // C - 1, 0) * C
        old = torch.arange(first, length, device=out.device)
        at = torch.arange(first, end, device=out.device)
        seen_slots = case.salient * (position // C - 1).clamp_min(0)
        in_window = (at[None, :] <= position[:, None]) & (at[None, :] >= (position // C * C - C)[:, None])
        slots = torch.arange(data.N, device=out.device)
        mask = torch.cat([slots[None, :] < seen_slots[:, None], in_window], 1)
        for head in range(case.heads):
            i_kv = head // (case.heads // case.kv_heads)
            i_select = i_kv if case.group else head

            k, v = (
                torch.cat(
                    [
                        x[f"salient_{name}"][row, i_select].double(),  # type: ignore[index]
                        x[f"window_{name}"][row, i_kv, old % (2 * C)].double(),  # type: ignore[index]
                        new[start : start + count, i_kv],
                    ]
                )
                for name, new in (("key", key), ("value", value))
            )
            s = query[start : start + count, head] @ k.nan_to_num().T * case.dim**-0.5
            s = s.masked_fill(~mask, float("-inf"))
            top = s.max(1).values
            early = (position < C) & case.phantom
            top = torch.where(early, top.clamp_min(0), top)
            p = torch.exp(s - top[:, None])
            factor = 1.0 if x["window_factor"] is None else x["window_factor"][head].double()
            above = p @ v.nan_to_num() * factor
            below = (p.sum(1) + early * C * torch.exp(-top)) * factor
            tile = position // C - length // C
            late = position >= 2 * C
            part = x["linear"][b, tile, head, position % C].double()  # type: ignore[index]
            if x["gate"] is not None:
                part = part * x["gate"][start : start + count, head].double()
            above = above + torch.where(late[:, None], part, 0.0)
            below = below + torch.where(late, x["linear_sum"][b, tile, head, position % C].double(), 0.0)  # type: ignore[index]
            result = above / (below + epsilon)[:, None]
            result[seen_slots > data.N] = float("nan")
            out[start : start + count, head] = result
    return out


def prepare(data: Data, kernel: str, output: Tensor) -> list[Any]:
    """Functions that launch the segments of a call, in order."""
    case = data.case
    launches = []
    for first in range(0, data.tiles, case.segment):
        count = min(case.segment, data.tiles - first)
        part = {
            name: data.tensors[name][:, first : first + count].contiguous()  # type: ignore[index]
            for name in ("linear", "linear_sum")
        }
        numbers = {
            "B": data.B,
            "T": data.T,
            "H": case.heads,
            "HK": case.kv_heads,
            "HS": case.kv_heads if case.group else case.heads,
            "K": case.salient,
            "N": data.N,
            "first_tile": first,
            "n_tiles": count,
            "phantom": int(case.phantom),
            "scale": case.dim**-0.5,
            "epsilon": 1e-6,
        }
        constants = {
            "C": C,
            "D": case.dim,
            "GATE": int(case.gate),
            "FACTOR": int(case.factor),
            "RAGGED": int(case.packed),
            "PAGES": 0 if data.pages is None else data.pages.kernel,
            "CODES": int(case.unpacked and kernel == "tma"),
        }
        scales = dict.fromkeys(f"{s.name}_scale" for s in HYBRID_ATTENTION.states if s.narrow)
        every = {**data.tensors, **data.paged, **scales, **part, "output": output}
        for name, held in (("ring", "window"), ("cached", "salient")):
            for kind in ("key", "value"):
                state = every[f"{held}_{kind}"]
                assert state is not None
                every[f"{name}_{kind}"] = state[data.rows].contiguous() if case.unpacked else state
        launches.append(_launch(kernel, case, every, numbers, constants))
    return launches


def _launch(
    kernel: str, case: Case, tensors: dict[str, Any], numbers: dict[str, Any], constants: dict[str, int]
) -> Any:
    """One launch of one of the kernels."""
    on_gpu = tensors["query"].is_cuda
    if kernel == "triton":
        import triton

        from still_kernels.hybrid_attention.prefill.triton_attend import attend_kernel as function

        settle = int(not triton.knobs.runtime.interpret)
        constants = {**constants, "DP": case.dim, "BM": 64, "BN": 64, "STAGES": 3, "SETTLE": settle, "EVICT": 0}
        constants["DOT"] = "tf32"  # type: ignore[assignment]
        grid, options = (numbers["n_tiles"], case.heads, numbers["B"]), {"num_warps": 4, "num_stages": 3}
    else:
        from still_kernels.hybrid_attention.sm90.gluon_attend import attend_tma_kernel as function

        constants = {**constants, "SLOTS": 256 // case.dim}
        tiles = -(-numbers["n_tiles"] * C // 128) * case.heads * numbers["B"]
        grid, options = (min(case.programs, tiles),), {"num_warps": 4}
    known = {**numbers, **constants}
    arguments: dict[str, Any] = {}
    for name in function.arg_names:
        plain = name.removeprefix("p_")
        if name.startswith("d_"):
            arguments[name] = _descriptor(name.removeprefix("d_"), tensors, on_gpu)
        else:
            arguments[name] = tensors[plain] if plain != name else known[name]
    if kernel == "tma" and not on_gpu:
        return lambda: gluon_interpreter().run(function, grid[0], arguments)
    return lambda: function[grid](**arguments, **options)


@functools.cache
def gluon_interpreter() -> Any:
    """The module of this folder, which is not a package."""
    path = Path(__file__).parents[1] / "gluon_interpreter.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _descriptor(name: str, tensors: dict[str, Any], on_gpu: bool) -> Any:
    """Of a tensor as rows; of queries, gates and outputs those of a token, of all others those of a head."""
    tensor = tensors[name]
    if tensor is None:
        return None
    dim = tensor.shape[-1]
    if not tensor.numel():
        tensor = tensors["key"]  # never read
    columns = dim if name in ("linear", "cached_key", "cached_value") else tensor.shape[-2] * dim
    if name.startswith("cached") and not tensor.is_contiguous():  # a view of pages, of which all rows are seen
        tensor = tensor.as_strided((tensor.shape[0] * tensor.stride(0) // dim, dim), (dim, 1))
    rows = 128 if name.endswith(("key", "value")) else 64
    if not on_gpu:
        return gluon_interpreter().Descriptor(tensor.view(-1, columns), (rows, dim))
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor.view(-1, columns), [rows, dim], layout)


def guarded_output(data: Data) -> tuple[Tensor, Tensor]:
    """An output of UNWRITTEN between margins of it, and both with the margins."""
    query = data.tensors["query"]
    assert query is not None
    block = torch.full((query.numel() + 2 * GUARD,), UNWRITTEN, dtype=query.dtype, device=query.device)
    return block[GUARD : GUARD + query.numel()].view(query.shape), block


def run_case(
    name: str, kernel: str, device: str = "cuda", dtype: str | None = None, repeats: int = 3
) -> dict[str, float]:
    """Errors of a case, with another dtype if one is given.

    Returns:
        "error": greatest difference from float64, relative above 1. "norm": the distance by Frobenius norm, relative. "wrong": elements
        that are NaN and should not be, or the other way. "outside": elements beside the output that were written. "repeats": runs
        that differ from the first in some bit.
    """
    data = make(replace(CASES[name], dtype=dtype or CASES[name].dtype), device)
    output, block = guarded_output(data)
    runs = []
    for _ in range(repeats):
        block.fill_(UNWRITTEN)
        for launch in prepare(data, kernel, output):
            launch()
        if device == "cuda":
            torch.cuda.synchronize()
        runs.append(output.clone())
    wanted = expected(data)
    got = runs[0].double()
    nan = wanted.isnan()
    wrong = int((got.isnan() != nan).sum())
    difference = torch.where(nan | got.isnan(), 0.0, got - wanted)
    scale = wanted.nan_to_num().abs().clamp_min(1)
    return {
        "error": (difference.abs() / scale).max().item(),
        "norm": (difference.norm() / wanted.nan_to_num().norm()).item(),
        "wrong": wrong,
        "outside": int((block[:GUARD] != UNWRITTEN).sum() + (block[-GUARD:] != UNWRITTEN).sum()),
        "repeats": sum(not torch.equal(run.nan_to_num(), runs[0].nan_to_num()) for run in runs[1:]),
    }


def main() -> None:
    kernel, *names = sys.argv[1:]
    device, repeats = ("cuda", 3) if torch.cuda.is_available() else ("cpu", 1)
    dtype = (
        "float32" if (kernel, device) == ("triton", "cpu") else None
    )  # Triton's interpreter computes with the bits of bfloat16
    if dtype:
        from tests.still_kernels import quick_interpreter

        quick_interpreter.install()
    results = {}
    for name in names or CASES:
        found = run_case(name, kernel, device, dtype, repeats)
        results[name] = {what: value if math.isfinite(value) else 1e30 for what, value in found.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
