"""The archive of cubins: what the index says, that it repeats byte for byte, and what is refused. No GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from still_kernels import aot
from still_kernels.common import cuda_function
from still_kernels.hybrid_attention.launch import FUNCTIONS as KERNELS
from still_kernels.hybrid_attention.plan import BY_TMA, Variant
from still_kernels.hybrid_attention.plan import KERNELS as OP
from still_kernels.hybrid_attention.plan.tiles import CLUSTERS, tile_table
from still_kernels.plan import Call
from still_kernels.tile import SHARED_BYTES

STEPS = {f"decode_{blocks}" for blocks in CLUSTERS}
"""Of sm_90 alone, where there is NVRTC."""
VARIANT = {"head_dim": 64, "feature_rows": 64, "chunk_size": 32, "select_scope": "kv_group_max", "count_dtype": "int32"}


def build(folder: Path, arch: str, variants: list[dict], cache: Path | None = None) -> dict:
    """Run the program in a process of its own, with a cache of its own if one is given: else what other tests compiled is there."""
    choice = folder.with_suffix(".json")
    choice.write_text(json.dumps(variants))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [
        sys.executable,
        "-m",
        "still_kernels.aot",
        "HybridAttention",
        "--arch",
        arch,
        "--variants",
        str(choice),
        "-o",
        str(folder),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "index.json").read_text())


def check_index(index: dict, folder: Path) -> None:
    """Properties that every host relies on."""
    assert (index["format"], index["version"]) == (aot.FORMAT, aot.FORMAT_VERSION)
    assert index["source_hash"] == aot.source_hash(OP)
    for entry in index["variants"]:
        arch = aot.parse_arch(entry["arch"])
        constants = dict(entry["constants"])
        unused = {name if constants[constant] else f"{name}_tma" for name, constant in BY_TMA.items()}
        key = entry["key"]
        plain = key["chunk_size"] == 64 and key["overflow"] == "error" and key["dtype"] != "float32"
        clusters = constants.pop("decode_clusters")
        assert clusters == (arch == 90 and plain and cuda_function.can_compile())
        assert ("nvrtc" in index) or not clusters
        unused |= set() if clusters else STEPS
        if not constants.pop("unpack_rows"):
            unused.add("unpack")
        assert set(entry["kernels"]) == set(KERNELS) - unused
        for name, kernel in entry["kernels"].items():
            symbol = "decode_cluster_kernel" if name in STEPS else f"{name}_kernel"
            assert kernel["symbol"] == symbol and kernel["threads"] == 32 * kernel["num_warps"]
            assert kernel["shared_bytes"] <= SHARED_BYTES[arch]
            assert kernel["trailing_null_pointers"] == (0 if name in STEPS else 2)
            assert kernel.get("cluster", 0) == (int(name.removeprefix("decode_")) if name in STEPS else 0)
            cubin = (folder / kernel["cubin"]).read_bytes()
            assert cubin[:4] == b"\x7fELF" and kernel["symbol"].encode() in cubin
            names = [(argument["type"] == "descriptor", argument["name"]) for argument in kernel["args"]]
            assert len(set(names)) == len(names) and (False, "query_start") not in names
            assert {argument["type"] for argument in kernel["args"]} <= {"ptr", "i32", "f32", "descriptor"}
        counts = {a["name"]: a["element"] for a in entry["kernels"]["decode"]["args"] if a["type"] == "ptr"}
        assert counts["past_length"] == ("i64" if entry["key"]["count_dtype"] == "int64" else "i32")
        assert {constants.pop(constant) for constant in BY_TMA.values()} <= {0, 1, 132}
        assert all(isinstance(value, int) and value > 0 for value in constants.values())


@pytest.mark.long
@pytest.mark.slow
def test_archive_repeats_byte_for_byte(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    folding = {**VARIANT, "overflow": "fold_oldest", "select_scope": "q_head"}
    index = build(first, "sm_90", [VARIANT, folding], tmp_path / "cache_a")
    check_index(index, first)
    repeated = build(second, "sm_90", [VARIANT], tmp_path / "cache_b")
    assert repeated["variants"] == index["variants"][:1]
    files = [path.name for path in second.glob("*.cubin")]
    assert files and all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


FOLDS = {"dtype": "float16", "overflow": "fold_oldest", "gate": 0, "window_factor": 1}
RELEASED = {"dtype": "float32", "saliency": "released_prefill"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, variants",
    [
        ("sm_90", [{}]),
        *(pytest.param(a, [{}], marks=pytest.mark.long) for a in aot.ARCHS if a not in ("sm_87", "sm_90", "sm_120")),
        pytest.param("sm_90", [FOLDS], marks=pytest.mark.long),
        # An edge device, and the least shared memory.
        *(pytest.param(a, [{}, FOLDS, RELEASED], marks=pytest.mark.long) for a in ("sm_87", "sm_120")),
    ],
)
def test_every_architecture(arch: str, variants: list[dict], tmp_path: Path) -> None:
    check_index(build(tmp_path / "out", arch, variants), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, pytest.param(90, marks=pytest.mark.long)])  # 86 has the least shared memory
@pytest.mark.parametrize(
    "properties",
    [
        {"feature_rows": 256},
        pytest.param(
            {"feature_rows": 256, "chunk_size": 256, "head_dim": 80, "select_scope": "kv_group_max"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"feature_rows": 256, "chunk_size": 32, "head_dim": 64, "dtype": "float32"}, marks=pytest.mark.long
        ),
        pytest.param(
            {"feature_rows": 256, "chunk_size": 256, "head_dim": 256, "dtype": "float32", "overflow": "fold_oldest"},
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda properties: " ".join(str(value) for value in properties.values()),
)
def test_the_largest_projections_fit(
    arch: int, properties: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory is known before LLVM optimizes and the assembler, which takes minutes for these, runs; too much is an error."""
    from triton.backends.nvidia import compiler

    def no_ptx(self: object, source: str, metadata: dict, *_: object) -> str:
        (metadata["name"],) = re.findall(r"define [^@]*ptx_kernel [^@]*@(\w+)", source)
        return ""

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler.llvm, "optimize_module", lambda *_: None)
    monkeypatch.setattr(compiler.CUDABackend, "make_ptx", no_ptx)
    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", lambda *_: b"no code")
    monkeypatch.setattr(aot, "read_entry", lambda cubin, symbol: None)
    monkeypatch.setattr(aot, "trailing_pointers", lambda *_: 0)
    entry, _ = aot.compile_variant("HybridAttention", Variant(**properties), arch)
    assert {*entry["kernels"], *BY_TMA, *(f"{name}_tma" for name in BY_TMA), *STEPS, "unpack"} == set(KERNELS)


GROUPS = {"dtype": "float16", "select_scope": "kv_group_max"}


@pytest.mark.long
@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"head_dim": 64, "feature_map": "softmax"},
        {"feature_rows": 192, "head_dim": 80, "chunk_size": 128, **GROUPS},
        {"feature_rows": 129, "head_dim": 96, "chunk_size": 256, **GROUPS},
    ],
    ids=lambda properties: " ".join(str(value) for value in properties.values()) or "default",
)
def test_the_largest_projections_assemble(properties: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers are known to the assembler alone: a matrix instruction that needs more than decode may have is an error."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = Variant(**{"feature_rows": 256, **properties})
    _, cubins = aot.compile_variant("HybridAttention", variant, 90, "decode")
    assert all(cubin[:4] == b"\x7fELF" for cubin in cubins.values())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--arch", "sm_70"], "sm_70"),
        (["--arch", "sm_90", "--variants", "choice.json"], "feature_map='cosine'"),
    ],
)
def test_refusals(arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice = tmp_path / "choice.json"
    choice.write_text(json.dumps([{"feature_map": "cosine"}]))
    arguments = [str(choice) if a == "choice.json" else a for a in arguments]
    assert aot.main(["HybridAttention", *arguments, "-o", str(tmp_path / "out")]) == 2
    assert word in capsys.readouterr().err


def test_folder_that_is_not_empty_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert aot.main(["HybridAttention", "--arch", "sm_90", "-o", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err


def test_splits_fill_the_chip_and_stay_mergeable() -> None:
    programs = tile_table(90, 128, 64, 128, False).host["decode_programs"]

    def decode_splits(batch: int, heads: int, slots: int) -> int:
        names = ("H", "HK", "HS", "D", "P", "F", "C")
        sizes = {**dict.fromkeys(names, heads), "B": batch, "T": 1, "N": slots}
        attributes = {a.name: a.default for a in OP.spec.attributes}
        constants = {**dict.fromkeys(OP.plan.constants, 1), "decode_programs": programs}
        call = Call(sizes, attributes, constants, "float16", "int64", shapes={"feature_q_weight": (1, 1, 1)})
        return int(OP.plan.evaluate(call).arguments["NS"])

    for batch, heads, slots in ((1, 32, 4088), (8, 32, 4088), (1, 8, 504), (64, 8, 100_000), (1, 32, 4)):
        splits = decode_splits(batch, heads, slots)
        assert 1 <= splits <= 24 and splits <= max(1, -(-slots // 32))
    assert decode_splits(1, 32, 0) == 1
    # Programs without a slot cost a wave: many rows need no more splits than fill the chip a few times over.
    assert [decode_splits(batch, 32, 4344) for batch in (1, 8, 16, 32, 64)] == [9, 8, 4, 2, 1]
