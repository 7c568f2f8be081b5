"""Steps by clusters of blocks on sm_90: token by token beside PyTorch. Without a GPU: that the source compiles, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from still_graphs.errors import ConfigError
from still_kernels import aot
from still_kernels.common import cuda_function
from still_kernels.common.cubin import read_entry
from still_kernels.hybrid_attention import plan as variants
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.plan import KERNELS, Variant, table_of
from still_kernels.hybrid_attention.plan.launches import PLAN
from still_kernels.hybrid_attention.sm90.cuda_decode import decode_cluster_kernel
from tests.cubins import cubin, info

LAYERS = [
    ("q_head", 128, 1, 8, 2),
    ("q_head", 64, 2, 9, 3),
    ("kv_group_max", 128, 1, 8, 2),
    ("kv_group_mean", 64, 3, 8, 4),
    ("q_head", 128, 9, 32, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scope", "dim", "batch", "heads", "kv_heads"), LAYERS)
def test_step_by_step(scope: str, dim: int, batch: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Six promotions; a row that brings no token now and then keeps its state."""
    from still_kernels.hybrid_attention.call import hybrid_attention
    from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention

    torch.manual_seed(0)
    config = HybridAttentionConfig(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, capacity_tokens=1024, select_scope=scope
    )
    got = wanted = HybridAttentionState.empty(config, batch, dtype, "cuda")
    weights = [(torch.randn(heads, dim, dim, device="cuda") * dim**-0.5).to(dtype) for _ in "qk"]
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-3
    for t in range(420):
        tokens = (torch.randn(batch, 1, n, dim, device="cuda").to(dtype) for n in (heads, kv_heads, kv_heads, heads))
        new = torch.ones(batch, dtype=torch.int64, device="cuda")
        if t % 7 == 3 and batch > 1:
            new[1] = 0
        inputs = Inputs(*tokens, *weights, new)
        output, got = hybrid_attention(inputs, config, got)
        expected, wanted = chunked_hybrid_attention(inputs, config, wanted)
        assert ((output.double() - expected.double()).norm() / expected.double().norm()).item() < limit
    for name, x in got.tensors().items():
        y = wanted.tensors()[name]
        if name.startswith(("window_k", "window_v", "salient", "length")):
            assert torch.equal(x, y), name
        else:
            x, y = (each.double().nan_to_num(posinf=0) for each in (x, y))
            assert ((x - y).norm() / y.norm()).item() < limit, name


def kernel_of(batch: int, **changes: object) -> set[str]:
    """What a step of Llama-3.1-8B's layer in bfloat16 launches on sm_90."""
    from still_kernels.hybrid_attention.launch import call_of

    config = HybridAttentionConfig(
        **{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "capacity_tokens": 65536, **changes}
    )
    table = table_of(config, 90, wide=False)
    slots = config.slots_for(config.capacity_tokens)
    return {step.kernel for step in PLAN.evaluate(call_of(config, torch.bfloat16, table, batch, 1, slots, 32)).steps}


@pytest.mark.parametrize(
    ("kernels", "batch", "changes"),
    [
        ({"decode_8"}, 1, {}),
        ({"decode_8"}, 2, {}),
        ({"decode_2"}, 4, {}),
        ({"decode_1"}, 64, {}),
        ({"decode"}, 1, {"select_scope": "kv_group_max"}),  # a long cache of one row
        ({"decode_8"}, 1, {"select_scope": "kv_group_max", "capacity_tokens": 8192}),
        ({"decode_8"}, 4, {"select_scope": "kv_group_max"}),
        ({"decode"}, 4, {"select_scope": "kv_group_max", "num_kv_heads": 32}),  # no two heads of a selection
        ({"decode"}, 1, {"cache": "int8"}),
        ({"decode"}, 1, {"head_dim": 80}),
        ({"decode"}, 1, {"saliency": "released_prefill"}),
        ({"decode"}, 1, {"feature_map": "relu"}),
        ({"select", "features", "scan", "decode"}, 1, {"overflow": "fold_oldest"}),
    ],
)
def test_which_calls_they_take(kernels: set[str], batch: int, changes: dict) -> None:
    assert kernel_of(batch, **changes) == kernels


VARIANTS = [
    {"count_dtype": "int32"},
    {"dtype": "float16", "head_dim": 64, "feature_rows": 64, "select_scope": "kv_group_max", "gate": 0},
    {"window_factor": 1},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_what_an_archive_says_of_them(fields: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the source in order, of the types that the plan's tensors have; what the variant lacks is no argument."""
    made: list[tuple] = []

    def keep(function: object, arch: int, macros: tuple, absent: tuple) -> cuda_function.Compiled:
        made.append((dict(macros), absent))
        kinds = (kind for name, kind in decode_cluster_kernel.arguments.items() if name not in absent)
        blocks = made[-1][0]["CL"]
        said = info([8 if kind.endswith("*") else 4 for kind in kinds], (blocks, 1, 1) if blocks > 1 else None)
        symbol = decode_cluster_kernel.symbol
        return cuda_function.Compiled(cubin(said, symbol), symbol, decode_cluster_kernel.shared_bytes(made[-1][0]))

    monkeypatch.setattr(cuda_function, "_compiled", keep)
    monkeypatch.setattr(variants, "can_compile", lambda: True)
    variant = Variant(**fields)
    half = {"float16": "fp16", "bfloat16": "bf16"}[variant.dtype]
    count = {"int32": "i32", "int64": "i64"}[variant.count_dtype]
    types = {"u16": half, "float": "fp32", "Count": count, "int": "i32"}
    absent = {"p_present_length"}  # hosts advance lengths themselves
    absent |= set() if variant.gate else {"p_gate"}
    absent |= set() if variant.window_factor else {"p_window_factor"}
    for blocks in (8, 2, 1):
        entry, _ = aot.compile_variant("HybridAttention", variant, 90, f"decode_{blocks}")
        kernel = entry["kernels"][f"decode_{blocks}"]
        got = [(a["name"], a["type"], a.get("element")) for a in kernel["args"]]
        assert got == [
            (name.removeprefix("p_"), "ptr", types[kind.removesuffix("*").removesuffix(" const")])
            if kind.endswith("*")
            else (name, {"int": "i32", "float": "f32"}[kind], None)
            for name, kind in decode_cluster_kernel.arguments.items()
            if name not in absent
        ]
        macros, without = made.pop()
        assert set(without) == absent and macros["CL"] == kernel["cluster"] == blocks
        assert (macros["T16"], macros["LONG"]) == (variant.dtype == "bfloat16", variant.count_dtype == "int64")
        assert (kernel["threads"], kernel["trailing_null_pointers"]) == (288, 0)
        assert kernel["shared_bytes"] == decode_cluster_kernel.shared_bytes(macros)


def test_archives_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps are decode's."""
    for there in (False, True):
        monkeypatch.setattr(variants, "can_compile", lambda there=there: there)
        build = KERNELS.build(Variant(), 90)
        names = {name for name in build.tiles if name.startswith("decode")}
        assert build.plan_constants["decode_clusters"] == there
        assert names == ({"decode", "decode_8", "decode_2", "decode_1"} if there else {"decode"})


def arguments(**constants: int) -> dict:
    """Of a launch, as far as compiling asks."""
    kinds = {"p_query": torch.empty(1, dtype=torch.float16), "p_past_length": torch.empty(1, dtype=torch.int32)}
    shape = {"C": 64, "D": 64, "P": 64, "FEATURE": 0, "SCOPE": 0, "CL": 8, "GR": 1, "NST": 4, "MINB": 3}
    return {**kinds, **shape, **constants}


@pytest.fixture
def nvrtc() -> None:
    """NVRTC, which builds of PyTorch for CUDA bring."""
    try:
        cuda_function.nvrtc()
    except ConfigError:
        pytest.skip("no NVRTC")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("constants", [{}, {"D": 128, "P": 128, "GR": 2, "CL": 2, "SCOPE": 1}, {"CL": 1, "P": 128}])
def test_it_compiles(constants: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda_function._compiled.cache_clear()
    made = decode_cluster_kernel.compiled(90, arguments(**constants))
    assert made.cubin[:4] == b"\x7fELF" and b"decode_cluster_kernel" in made.cubin
    cuda_function._compiled.cache_clear()  # and what was compiled is found
    monkeypatch.setattr(cuda_function, "compile_source", None)
    assert decode_cluster_kernel.compiled(90, arguments(**constants)) == made


@pytest.mark.usefixtures("nvrtc")
def test_it_compiles_for_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pointers that an archive's calls lack: they are null in the source."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda_function._compiled.cache_clear()
    entry, cubins = aot.compile_variant("HybridAttention", Variant(gate=0), 90, "decode_8")
    (cubin,) = cubins.values()
    assert cubin[:4] == b"\x7fELF" and b"decode_cluster_kernel" in cubin
    sizes = [4 if a["type"] in ("i32", "f32") else 8 for a in entry["kernels"]["decode_8"]["args"]]
    assert list(read_entry(cubin, "decode_cluster_kernel").sizes) == sizes


@pytest.mark.usefixtures("nvrtc")
def test_a_source_that_is_refused_says_why() -> None:
    with pytest.raises(ConfigError, match=r"NVRTC does not compile cuda_decode.cu: .*static assertion"):
        decode_cluster_kernel.compiled(90, arguments(C=32))


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_function, "NVRTC", ("libnothing.so.1",))
    monkeypatch.setattr(cuda_function.ctypes.util, "find_library", lambda _: None)
    with pytest.raises(ConfigError, match="pip install nvidia-cuda-nvrtc-cu12"):
        cuda_function.nvrtc.__wrapped__()
