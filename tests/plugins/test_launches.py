"""The core launches what the Python launcher launches: same kernels, grids, numbers and pointers, same workspace."""

from __future__ import annotations

import itertools
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.export.plugins import pack_archive
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState
from tests.plugins.core_abi import Core, Recorder, Tensor

launch = pytest.importorskip("still_kernels.hybrid_attention.launch")
aot = pytest.importorskip("still_kernels.aot")

TYPES = {"ptr": "p", "i32": "i", "f32": "f"}
NAMES = {torch.float16: "float16", torch.float32: "float32", torch.int32: "int32", torch.bfloat16: "bfloat16"}
CASES = [
    # batch, tokens, capacity tokens, select_scope, overflow, gate, dtype
    (1, 1, 4096, "q_head", "error", "channel", torch.float16),
    (3, 1, 65536, "kv_group_max", "error", "none", torch.bfloat16),
    (8, 1, 65536, "q_head", "error", "channel", torch.float16),
    (2, 1, 640, "q_head", "fold_min_score", "channel", torch.float16),
    (2, 2, 4096, "q_head", "error", "channel", torch.float16),
    (2, 300, 4096, "kv_group_mean", "error", "channel", torch.float16),
    (1, 2048, 65536, "q_head", "error", "none", torch.float16),
    (1, 300, 640, "q_head", "fold_oldest", "channel", torch.float32),
    (1, 300, 640, "q_head", "fold_min_score", "channel", torch.float16),
    (1, 20000, 65536, "q_head", "error", "channel", torch.float16),
]


@pytest.fixture(scope="module")
def fake_compiler() -> Any:
    """triton.compile that returns a text in the place of a cubin: the index is real, the code is not."""
    import triton

    counter = itertools.count()

    def compile_nothing(source: Any, target: Any, options: dict[str, Any]) -> Any:
        metadata = types.SimpleNamespace(
            name=source.fn.__name__,
            num_warps=options["num_warps"],
            shared=1000,
            global_scratch_size=0,
            profile_scratch_size=0,
        )
        return types.SimpleNamespace(metadata=metadata, asm={"cubin": f"cubin {next(counter):06} ".ljust(64).encode()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", compile_nothing)
        yield


def config_of(scope: str, overflow: str, gate: str, capacity: int) -> HybridAttentionConfig:
    return HybridAttentionConfig(
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        chunk_size=64,
        salient_per_chunk=4,
        select_scope=scope,
        gate=gate,
        capacity_tokens=capacity,
        overflow=overflow,
        mix_epsilon=1e-5,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_core_mirrors_the_python_launcher(
    case: Any, core: Core, recorder: Recorder, fake_compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, tokens, capacity, scope, overflow, gate, dtype = case
    config = config_of(scope, overflow, gate, capacity)
    state = HybridAttentionState.empty(config, batch, dtype)
    tensors: dict[str, torch.Tensor] = {
        "query": torch.empty(batch, tokens, 6, 64, dtype=dtype),
        "key": torch.empty(batch, tokens, 2, 64, dtype=dtype),
        "value": torch.empty(batch, tokens, 2, 64, dtype=dtype),
        "feature_q_weight": torch.empty(6, 64, 64, dtype=dtype),
        "feature_k_weight": torch.empty(6, 64, 64, dtype=dtype),
        "new_tokens": torch.empty(batch, dtype=torch.int32),
        "past_length": torch.empty(batch, dtype=torch.int32),
    }

    if gate == "channel":
        tensors["gate"] = torch.empty(batch, tokens, 6, 64, dtype=dtype)
    states = {name: tensor for name, tensor in state.tensors().items() if name != "length"}

    expected: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def record(self: Any, name: str, grid: tuple[int, int, int], **more: Any) -> None:
        if 0 not in grid:
            expected.append((name, grid, {**self.values, **self.tiles[name].constants, **more}))

    monkeypatch.setattr(launch.Launcher, "__call__", record)
    output = torch.empty_like(tensors["query"])
    launch.launch_hybrid_attention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        tensors.get("gate"),
        tensors["feature_q_weight"],
        tensors["feature_k_weight"],
        config,
        HybridAttentionState(**states, length=tensors["past_length"]),
        output,
        batch,
        tokens,
        tensors["new_tokens"],
    )

    variant = aot.Variant(
        dtype=NAMES[dtype],
        head_dim=64,
        chunk_size=64,
        feature_rows=64,
        gate=int(gate == "channel"),
        select_scope=scope,
        overflow=overflow,
        count_dtype="int32",
    )
    index = aot.write_archive(tmp_path / "aot", [90], [variant])
    core.call("still_add_archive", str(pack_archive([tmp_path / "aot"], tmp_path / "kernels.bin")).encode())
    kernels = index["variants"][0]["kernels"]
    for kernel in kernels.values():
        signature = "".join(TYPES[a["type"]] for a in kernel["args"])
        recorder.arguments(kernel["symbol"], signature + "p" * kernel["trailing_null_pointers"])

    given = {**tensors, **{f"past_{name}": tensor for name, tensor in states.items()}}
    names = [n for n in HYBRID_ATTENTION.input_names() if n in given]
    absent = sum(1 << i for i, n in enumerate(HYBRID_ATTENTION.input_names()) if n not in given)
    op = core.op("HybridAttention", config.attributes(), absent)
    assert op.names("input") == names
    inputs: list[Tensor] = [(NAMES[given[n].dtype], tuple(given[n].shape)) for n in names]
    op.prepare(inputs)
    at = {n: 0x100000 * (i + 1) for i, n in enumerate(names)}
    outputs = [0x9000000 if n == "output" else at[n.replace("present_", "past_")] for n in op.names("output")]
    workspace = 0x70000000
    op.launch([at[n] for n in names], outputs, workspace, 0)

    launches = recorder.launches()
    assert [name for name, _ in launches] == [kernels[name]["symbol"] for name, _, _ in expected]
    regions: dict[str, int] = {}
    for (name, grid, values), (_, fields) in zip(expected, launches, strict=True):
        assert fields["grid"] == ",".join(map(str, grid)), name
        got = dict(zip([a["name"] for a in kernels[name]["args"]], fields["args"].split(","), strict=False))
        for argument in kernels[name]["args"]:
            key, wanted = argument["name"], values.get(argument["name"])
            if argument["type"] != "ptr":
                assert float(got[key]) == pytest.approx(float(wanted), rel=1e-5), (name, key)
            elif wanted is None:
                assert got[key] == "0", (name, key)
            elif key in states:
                assert int(got[key]) == at[f"past_{key}"], (name, key)
            elif key == "output" or key in tensors:
                assert int(got[key]) == (0x9000000 if key == "output" else at[key]), (name, key)
            elif key == "score" and tokens == 1:
                assert int(got[key]) == at["past_window_score"]
            elif key != "counters":
                assert int(got[key]) >= workspace and regions.setdefault(key, int(got[key])) == int(got[key]), (
                    name,
                    key,
                )
    table = launch.device_table(config, torch.device("cpu"), dtype == torch.float32)
    splits = launch.decode_splits(batch, config.select_heads, state.slots, table.decode_programs)
    shapes = launch.workspace_shapes(config, batch, tokens, batch * tokens, table, splits)
    sizes = {"float32": 4, "int8": 1, "int32": 4, "T": dtype.itemsize, "L": 4 if dtype == torch.float32 else 2}
    ends = [*sorted(regions.values())[1:], workspace + op.workspace(inputs)]
    room = dict(zip(sorted(regions, key=lambda n: regions[n]), ends, strict=True))
    for key, start in regions.items():
        shape, kind = shapes[key]
        assert room[key] - start >= torch.Size(shape).numel() * sizes[kind], key
