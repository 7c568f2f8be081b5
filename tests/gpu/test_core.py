"""What the C++ core launches from cubins against what Python launches with Triton, bit for bit, on a GPU.

Prefill in pieces and single steps of hybrid attention, with states of their own and in place. The kernels are
compiled here; the core needs no CUDA to be built.
"""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from still_export.targets.trt.plugins import pack_archive
from still_kernels import aot, launcher
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.launch import launch_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.plan import Variant
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from tests.gpu.conftest import Proof
from tests.plugins import builds
from tests.plugins.core_abi import Core

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int64: "int64"}
MANY = "bfloat16, 128"
CASES: dict[str, dict[str, Any]] = {
    MANY: {"dtype": "bfloat16", "head_dim": 128},
    "float16, 64, group": {"dtype": "float16", "head_dim": 64, "select_scope": "kv_group_max"},
}
CALLS = ([300, 129], [64, 700], [1, 1], [2, 0], [17, 2], [1, 1], [1, 0])
"""Tokens of two rows; the last step but one promotes in both."""
RUNS = [*((name, 2, in_place) for name in CASES for in_place in (False, True)), *((MANY, n, True) for n in (12, 24))]
"""Cases, rows and whether states are in place; as many rows as take clusters of 8, 2 and 1 blocks on sm_90."""


def variant_of(case: dict[str, Any]) -> Variant:
    """The kernels of a case."""
    return Variant(**{"feature_rows": case["head_dim"], **case})


def tensors_of(config: HybridAttentionConfig, counts: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of a call without its states."""
    lead = (len(counts), max(counts))
    shapes = {
        "query": config.num_heads,
        "key": config.num_kv_heads,
        "value": config.num_kv_heads,
        "gate": config.num_heads,
    }
    found: dict[str, Any] = {
        name: torch.randn(*lead, heads, config.head_dim, device="cuda").to(dtype) for name, heads in shapes.items()
    }
    return found | {"new_tokens": torch.tensor(counts, device="cuda")}


def check(core: Core, name: str, rows: int, in_place: bool) -> str:
    """Run the calls of a case both ways; returns what differs, or nothing."""
    torch.manual_seed(0)
    case = CASES[name]
    variant, dtype = variant_of(case), getattr(torch, case["dtype"])
    config = dataclasses.replace(
        variant.config(), num_heads=8, num_kv_heads=2, salient_per_chunk=5, capacity_tokens=2048
    )
    shape = (config.num_heads, config.projection_dim, config.head_dim)
    weights = {f"feature_{x}_weight": (torch.randn(shape, device="cuda") * shape[2] ** -0.5).to(dtype) for x in "qk"}
    states = [HybridAttentionState.empty(config, rows, dtype, "cuda") for _ in "pc"]
    absent = 1 << HYBRID_ATTENTION.input_names().index("window_factor")
    op = core.op("HybridAttention", config.attributes(), absent)
    for pair in CALLS:
        counts = pair * (rows // 2)
        given = tensors_of(config, counts, dtype) | weights
        inputs = Inputs(**{f.name: given.get(f.name) for f in dataclasses.fields(Inputs)})
        output = torch.full_like(given["query"], float("nan"))
        launch_hybrid_attention(inputs, config, states[0], output)

        past = {f"past_{n}": t for n, t in states[1].tensors().items()}
        tensors = {**given, **past}
        shapes = [(NAMES[tensors[n].dtype], tuple(tensors[n].shape)) for n in op.names("input")]
        op.prepare(shapes)
        mine = torch.full_like(output, float("nan"))
        present = {n: t if in_place else torch.empty_like(t) for n, t in past.items()}
        at = [tensors[n].data_ptr() for n in op.names("input")]
        out = [
            mine.data_ptr() if n == "output" else present[n.replace("present_", "past_")].data_ptr()
            for n in op.names("output")
        ]
        workspace = torch.empty(max(op.workspace(shapes), 1), dtype=torch.int8, device="cuda")
        op.launch(at, out, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        wrong = [] if torch.equal(output.nan_to_num(), mine.nan_to_num()) else ["output"]
        for n, tensor in states[0].tensors().items():
            if n != "length":
                states[1].tensors()[n].copy_(present[f"past_{n}"])
                wrong += [] if torch.equal(tensor, present[f"past_{n}"]) else [n]
        if output.isnan().any() or wrong:
            return f"{pair}: {', '.join(wrong) or 'NaN'}"
        for state in states:
            state.length.add_(torch.tensor(counts, device="cuda"))
    return ""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    """The library with the kernels of all cases, for this GPU."""
    folder = tmp_path_factory.mktemp("core")
    made = Core(builds.optimized("still_core", "libstill_core.so", folder))
    arch = launcher.arch_of(torch.device("cuda"))
    aot.write_archive(folder / "aot", [arch], "HybridAttention", map(variant_of, CASES.values()), len(CASES))
    made.call("still_add_archive", str(pack_archive([folder / "aot"], folder / "kernels.bin")).encode())
    torch.zeros(1, device="cuda")
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows", "in_place"), RUNS)
def test_core(name: str, rows: int, in_place: bool, core: Core, proof: Proof) -> None:
    states = "in place" if in_place else "apart"
    proof.subject |= {"op": "HybridAttention", "case": name, "rows": str(rows), "states": states}
    assert check(core, name, rows, in_place) == ""


def test_cases_have_kernels() -> None:
    """Every case is a variant that the kernels have, and its calls fit the capacity that `check` gives."""
    for case in CASES.values():
        assert variant_of(case).config().chunk_size
    assert max(map(sum, zip(*CALLS, strict=True))) < 2048
    *before, step, _ = CALLS
    assert step == [1, 1] and [sum(tokens) % 64 for tokens in zip(*before, strict=True)] == [0, 0]
