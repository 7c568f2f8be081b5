"""Host side of the Triton kernels: counters of decode across streams and CUDA graphs, and the device that launches go to."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from still_graphs.errors import ConfigError, UnsupportedError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState

pytest.importorskip("triton")
from still_kernels import launcher
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.plan import BY_TMA
from still_kernels.hybrid_attention.plan.tiles import CLUSTERS
from still_kernels.registry import kernels_of, op_names

CPU = torch.device("cpu")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stream that calls see, and empty tables of counters."""
    now: dict[str, Any] = {"stream": 1, "capturing": False}
    monkeypatch.setattr(launcher, "current_stream", lambda device: (now["stream"], now["capturing"]))
    for table in ("_counters", "_spare"):
        monkeypatch.setattr(launcher, table, {})
    monkeypatch.setattr(launcher, "_made", [])
    return now


def test_counters_of_a_capture_were_zero_before_it(stream: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroing that a capture records does not happen until its replay, which may come after other users of the stream."""
    eager = launcher.persistent_counters(CPU, 10)
    assert not eager.any()
    stream.update(stream=2, capturing=True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("work recorded in a capture"))
    captured = launcher.persistent_counters(CPU, 10)
    assert captured.data_ptr() != eager.data_ptr() and captured.numel() >= 10 and not captured.any()
    assert launcher.persistent_counters(CPU, 10) is captured


def test_counters_are_of_one_stream_and_stay(stream: dict[str, Any]) -> None:
    """A graph holds the address of counters that have become too small for later calls."""
    small = launcher.persistent_counters(CPU, 10)
    size = small.numel() + 1
    large = launcher.persistent_counters(CPU, size)
    assert large.numel() >= size and launcher.persistent_counters(CPU, 10) is large
    stream["stream"] = 2
    other = launcher.persistent_counters(CPU, size)
    regions = {t.data_ptr() for t in (small, large, other)}
    assert len(regions) == 3
    assert all(any(block[0].data_ptr() <= p <= block[-1].data_ptr() for block in launcher._made) for p in regions)


def test_a_capture_without_a_call_ahead_is_refused(stream: dict[str, Any]) -> None:
    stream["capturing"] = True
    with pytest.raises(UnsupportedError, match="before the capture"):
        launcher.persistent_counters(CPU, 10)


@pytest.mark.parametrize("tokens", [1, 40])
def test_kernels_go_to_the_device_of_the_tensors(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which in a model over several GPUs is not that of the layer."""
    config = HybridAttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, chunk_size=32, capacity_tokens=256)
    inside: list[torch.Tensor] = []
    launched: list[tuple[str, bool]] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        inside.append(tensor)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(launcher.Launcher, "start", lambda self, name, run: launched.append((name, bool(inside))))
    query, key = torch.zeros(1, tokens, 4, 64), torch.zeros(1, tokens, 2, 64)
    weight, state = torch.zeros(1, 64, 64), HybridAttentionState.empty(config, 1)
    inputs = Inputs(query, key, key, query, weight, weight, torch.tensor([tokens]))
    launch.launch_hybrid_attention(inputs, config, state, query.clone())
    assert launched and all(guarded for _, guarded in launched)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Kernels in the order of their launches, and whether each was found: options and names are for Triton's own search."""
    launches: list[tuple[str, bool]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *_: None

    def start(self: Any, name: str, run: Any) -> Compiled:
        launches.append((name, not run.keywords))
        return Compiled()

    monkeypatch.setattr(launcher.Launcher, "start", start)
    monkeypatch.setattr(launcher, "_compiled", {})
    return launches


def test_a_launch_finds_the_kernel_that_its_like_ran(found: list[tuple[str, bool]]) -> None:
    """By what Triton compiles for: types and alignment of the pointers, which there are, the layer. Not by integers at run time."""
    base = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "chunk_size": 32, "capacity_tokens": 256}

    def call(tokens: int = 40, shift: int = 0, kind: torch.dtype = torch.int64, own: bool = False, **more: Any) -> str:
        config = HybridAttentionConfig(**{**base, **more})
        query, key = torch.zeros(tokens * 256 + shift)[shift:].view(1, tokens, 4, 64), torch.zeros(1, tokens, 2, 64)
        weight, state = torch.zeros(1, 64, 64), HybridAttentionState.empty(config, 1)
        new, table = torch.tensor([tokens], dtype=kind), launch.device_table(config, CPU, True) if own else None
        found.clear()
        given = Inputs(query, key, key, query if config.gate == "channel" else None, weight, weight, new)
        launch.launch_hybrid_attention(given, config, state, torch.zeros(1, tokens, 4, 64), table=table)
        return {(True,): "all", (False,): "none"}.get(tuple({known for _, known in found}), "some")

    assert [call(), call(), call(tokens=80)] == ["none", "all", "all"]
    assert [call(shift=1), call(shift=1), call(shift=4)] == ["some", "all", "all"]  # not all kernels take queries
    assert [call(kind=torch.int32), call(own=True), call(own=True)] == ["none"] * 3
    assert [call(gate="none"), call(gate="none"), call(salient_per_chunk=8)] == ["none", "all", "none"]
    assert [call(tokens=1), call(tokens=1)] == ["none", "all"]


def test_what_a_descriptor_cannot_be_made_of_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address must be a multiple of 16."""
    from still_kernels.dense_matmul.plan import OP
    from still_kernels.dense_matmul.plan import Inputs as Product

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(launcher.Launcher, "start", lambda _, name, run: seen.append(run.keywords["d_rows"].base))
    rows = torch.arange(65 * 8 + 1).half()[1:].view(1, 65, 8)
    OP.launch(Product(rows, torch.zeros(8, 8).half()), torch.zeros(1, 65, 8).half())
    assert rows.data_ptr() % 16 and not seen[0].data_ptr() % 16 and torch.equal(seen[0], rows)


def test_a_function_of_two_names_is_compiled_for_each(found: list[tuple[str, bool]]) -> None:
    """Blocks of some rows and of many are constants of one function: the grid of one with the blocks of the other leaves outputs out."""
    from still_kernels.dense_matmul.plan import OP
    from still_kernels.dense_matmul.plan import Inputs as Product

    for rows in (65, 1030, 65, 1030):
        given = Product(torch.zeros(1, rows, 8).half(), torch.zeros(8, 4096).half())
        OP.launch(given, torch.zeros(1, rows, 4096).half())
    seen = [(name.removesuffix("_tma"), known) for name, known in found]
    assert seen == [("some", False), ("many", False), ("some", True), ("many", True)]


@pytest.mark.parametrize("overflow", ["error", "fold_oldest"])
def test_a_bound_step_passes_what_a_launch_passes(overflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses of the same tensors, in the same places; buffers of its own that do not overlap."""
    config = HybridAttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=64, chunk_size=32, capacity_tokens=256, overflow=overflow
    )
    started: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *values: started.append((grid, values))

    def start(self: Any, name: str, run: Any) -> Compiled:
        if run.keywords:
            started.append(((0, 0, 0), tuple(run.keywords.values())))
        else:
            run()
        return Compiled()

    monkeypatch.setattr(launcher.Launcher, "start", start)
    monkeypatch.setattr(launcher, "_compiled", {})
    query, key = torch.zeros(2, 1, 4, 64), torch.zeros(2, 1, 2, 64)
    weight, state = torch.zeros(1, 64, 64), HybridAttentionState.empty(config, 2)
    inputs = Inputs(query, key, key.clone(), query.clone(), weight, weight.clone(), torch.ones(2, dtype=torch.int64))
    bound = launch.bind_decode(inputs, config, state, None)
    output = torch.empty_like(query)
    given = (query, key, inputs.value, inputs.gate, weight, inputs.feature_k_weight, inputs.new_tokens, state.length)
    bound.run(output, *given)  # type: ignore[arg-type]
    launched, steps = list(started), bound.prepared.launches
    started.clear()
    bound.run(output, *given)  # type: ignore[arg-type]
    assert len(started) == len(launched) == len(steps)
    own = {"part_acc", "part_ml", "part_window", "part_lin", "part_den", "counters"}
    own |= {name for name, _, _ in bound.prepared.workspace}
    for step, (_, expected), (grid, values) in zip(steps, launched, started, strict=True):
        assert grid == step.grid
        pointers = dict(step.pointers)
        for i, (wanted, got) in enumerate(zip(expected, values, strict=False)):
            if pointers.get(i) in own:
                assert (wanted is None) == (got is None)
            else:
                assert got == (wanted.data_ptr() if isinstance(wanted, torch.Tensor) else wanted), pointers.get(i)
        places = {name: values[i] for i, name in step.pointers if name in bound.workspace}
        sizes = {n: math.prod(shape) * dtype.itemsize for n, shape, dtype in bound.prepared.workspace}
        ends = sorted((place, place + sizes[name]) for name, place in places.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)) and ends[-1][1] - ends[0][0] <= bound.work_bytes


def test_a_step_before_a_capture_leaves_counters_for_it(stream: dict[str, Any]) -> None:
    launcher.spare_counters(CPU, 10)
    launcher.persistent_counters(CPU, 10)
    stream.update(stream=2, capturing=True)
    assert not launcher.persistent_counters(CPU, 10).any()


@pytest.mark.parametrize("op", op_names())
def test_plan_and_kernels_of_an_op_go_together(op: str) -> None:
    """Integers at run time stay unspecialised: one kernel serves all of them, ahead of time and where a launch finds one that ran."""
    kernels = kernels_of(op)
    kernels.check()
    assert kernels.element_types(kernels.variant()).keys() >= set(kernels.plan.spec.input_names()[:1])


def test_what_does_not_go_together_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of("HybridAttention")
    plan = replace(kernels.plan, arguments={k: v for k, v in kernels.plan.arguments.items() if k != "NS"})
    with pytest.raises(ConfigError, match="decode takes NS, which the plan does not pass"):
        replace(kernels, plan=plan).check()
    functions = {name: f for name, f in kernels.functions().items() if name != "scan"}
    with pytest.raises(ConfigError, match="launches the unknown kernel scan"):
        replace(kernels, functions=lambda: functions).check()
    with pytest.raises(ConfigError, match="variants have"):
        replace(kernels, plan=replace(kernels.plan, key={"dtype": "dtype"})).check()


@pytest.mark.long
def test_kernels_of_a_case_compile_ahead_for_the_just_in_time_path(tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools/compile_kernels.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tool), "--jobs", "1", "packed, folding"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "2 of 2 layers compile for sm_90" in done.stdout
    kernels = {path.stem for path in tmp_path.glob("*/*.cubin")}
    assert {f"{name}_kernel" for name in launch.FUNCTIONS} - kernels == {
        "decode_kernel",  # the case has no single step
        *(f"decode_{blocks}_kernel" for blocks in CLUSTERS),
        "unpack_kernel",  # nor rows in 8 bits
        *(f"{name}_tma_kernel" for name in BY_TMA),  # nor a layer that these serve
    }


def test_calls_leave_no_constants_behind() -> None:
    """A layer whose states lay in pages may find its rows side by side next, in the same process."""
    config = HybridAttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, feature_dim=64, capacity_tokens=416)

    def values(pages: Pages | None) -> list[tuple[Any, ...]]:
        call = (2, 66, config.capacity_slots, 1, (101, 3))
        prepared = launch._prepare(
            config, torch.float32, launch.device_table(config, CPU, True), None, False, pages, *call
        )
        return [step.values for step in prepared.launches]

    before = values(None)
    assert values(Pages.of(config, config.capacity_slots, torch.float32)) != before, "no kernel knows pages"
    assert values(None) == before
