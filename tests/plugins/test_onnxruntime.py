"""The native CPU kernel of still::HybridAttention, in ONNX Runtime, against the PyTorch form; the cases are those of the function body."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from still_export.runtime.ort_session import LEAST_VERSION
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from tests.still_graphs import test_functions as body
from tests.still_kernels.hybrid_attention.definition import hybrid_definition
from tests.tolerances import REFERENCE

pytest.importorskip("onnxruntime")

FOLDING = [*body.SPLITS, 37, [20, 3], 1, 1, 1, 1, 1]
CASES: list[tuple[dict[str, Any], Any]] = [
    *((knobs, body.SPLITS) for knobs in body.KNOBS),
    ({"feature_map": "identity"}, body.SPLITS),
    ({"chunk_size": 64, "salient_per_chunk": 4, "head_dim": 16, "feature_dim": None, "capacity_tokens": 1000},
     [130, 1, 1, 1, 59, 1, 1, [1, 61], [0, 1], [3, 70], 1, 200]),
    ({"chunk_size": 40, "head_dim": 20, "feature_dim": 33, "capacity_tokens": 1000}, [97, 1, 1, 30, [33, 64], 120]),
    *(({"capacity_tokens": 20, "overflow": "fold_oldest", **knobs}, FOLDING)
      for knobs in ({}, {"select_scope": "kv_group_mean"}, {"local": "sliding"}, {"capacity_tokens": 8})),
]  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("knobs, splits", CASES, ids=str)
def test_kernel_equals_stateful_form(library: str, knobs: dict[str, Any], splits: Any, in_place: bool) -> None:
    body.check(body.config(**knobs), splits, in_place=in_place, library=library)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_instruction_sets(library: str, dtype: torch.dtype) -> None:
    """Each one that this processor has; half precision converts on its own way in each."""
    c = body.config(chunk_size=16, head_dim=24, feature_dim=20, capacity_tokens=400)
    body.check(c, [70, 1, 1, 12, [1, 9], 40], dtype, library=library)


def test_logits_far_apart(library: str) -> None:
    runner = body.Runner(body.config(), torch.float32, 2, False, library=library)
    for feeds, expected, split in body.steps(body.config(), [5, 1, 1, 9, 1, 1, [3, 1]], torch.float32, 2, 400.0):
        for name, tensor in runner(feeds).items():
            body.close(tensor, expected[name], REFERENCE[torch.float32], f"{name} after {split}")


def test_equals_the_quadratic_definition(library: str) -> None:
    c = body.config()
    runner = body.Runner(c, torch.float32, 2, True, library=library)
    parts = [(feeds, runner(feeds)["output"]) for feeds, _, _ in body.steps(c, [9, 1, 1, 13, 1, 20], torch.float32, 2)]
    whole = [torch.cat([feeds[n] for feeds, _ in parts], dim=1) for n in ("query", "key", "value", "gate")]
    weights = [parts[0][0][f"feature_{n}_weight"] for n in "qk"]
    expected = hybrid_definition(Inputs(*whole, *weights), c)
    body.close(torch.cat([o for _, o in parts], dim=1), expected, REFERENCE[torch.float32], "output")


@pytest.mark.parametrize("knobs", [{}, {"select_scope": "kv_group_max"}, {"local": "sliding"}], ids=str)
def test_threads_change_no_bit(library: str, knobs: dict[str, Any]) -> None:
    """A cache of several parts: its split must not depend on who computes it."""
    c = body.config(chunk_size=8, salient_per_chunk=8, head_dim=16, capacity_tokens=600, **knobs)
    runs = []
    for threads in (1, 2, 2):
        runner = body.Runner(c, torch.float32, 2, True, library=library, threads=threads)
        runs.append([runner(feeds) for feeds, *_ in body.steps(c, [310, 1, 1, 9, [1, 3], 1], torch.float32, 2)])
    for others in runs[1:]:
        for first, other in zip(runs[0], others, strict=True):
            assert all(torch.equal(first[name], other[name]) for name in first)


def test_long_cache_in_parts(library: str) -> None:
    c = body.config(chunk_size=8, salient_per_chunk=8, head_dim=16, capacity_tokens=600)
    body.check(c, [310, 1, 1, 1, [1, 0], 1], in_place=True, library=library)


def test_exponential(library: str) -> None:
    """z of one promoted token is e^x with this map, so z shows the kernel's exponential over its whole range."""
    c = body.config(
        num_heads=1, num_kv_heads=1, head_dim=1, feature_dim=1, chunk_size=1, salient_per_chunk=0,
        feature_map="elu_plus_one", gate="none",
    )  # fmt: skip
    x = torch.linspace(-27.5, -1e-4, 4001)  # below, the floor of 1e-12
    runner = body.Runner(c, torch.float32, len(x), True, library=library)
    feeds = {n: torch.ones(len(x), 3, 1, 1) for n in ("query", "value")}
    feeds["key"] = x[:, None, None, None].repeat(1, 3, 1, 1)
    feeds |= {f"feature_{n}_weight": torch.ones(1, 1, 1) for n in "qk"}
    feeds |= {"new_tokens": torch.full((len(x),), 3), "past_length": torch.zeros(len(x), dtype=torch.int64)}
    z = runner(feeds)["z_state"].flatten().double()
    expected = x.double().exp()
    assert float(((z - expected) / expected).abs().max()) < 1e-6


def test_nodes_of_different_attributes(library: str) -> None:
    """Attributes are each node's own, also where functions have overloads."""
    model = body.node_model(body.config(), torch.float32, 2)
    del model.functions[:]
    for attribute in model.graph.node[1].attribute:
        if attribute.name == "mix_epsilon":
            attribute.f = 0.25
    assert body.attach_functions(model) == 2
    session = body.session(model, library=library)
    feeds = {}
    for info in session.get_inputs():
        shape = [{"B": 1, "T": 3, "N": 4}.get(d, d) for d in info.shape]
        feeds[info.name] = np.ones(shape, np.int64 if "int64" in info.type else np.float32)
    feeds["new_tokens"][:], feeds["past_length"][:] = 3, 0
    feeds = {n: v * 0 if n.startswith("past_") else v for n, v in feeds.items()}
    first, second = session.run(["output.0", "output.1"], feeds)
    assert first[0, 0, 0, 0] == pytest.approx(1.0, abs=1e-5)
    assert second[0, 0, 0, 0] == pytest.approx(1 / 1.25, abs=1e-5)


def test_the_kernel_takes_the_node(library: str, tmp_path: Path) -> None:
    """Not the body: one node stays in the graph that runs."""
    body.session(body.node_model(body.config(), torch.float32, 2), save=str(tmp_path / "run.onnx"), library=library)
    assert [n.op_type for n in onnx.load(tmp_path / "run.onnx").graph.node] == ["HybridAttention"] * 2


@pytest.mark.parametrize("version", ["1.23.2", "1.24.9", "0.9", "unknown"])
def test_an_old_runtime_is_refused_in_a_sentence(library: str, version: str) -> None:
    """1.23 would end by SIGSEGV in the kernels. The first function of the API makes a status, of which nothing else is asked."""
    said: list[bytes] = []
    make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(lambda code, text: said.append(text) or 1)
    functions = (ctypes.c_void_p * 1000)(ctypes.cast(make, ctypes.c_void_p))
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda number: ctypes.addressof(functions))
    name = ctypes.create_string_buffer(version.encode())
    told = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(name))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get, ctypes.c_void_p), ctypes.cast(told, ctypes.c_void_p))
    register = ctypes.CDLL(library).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    least = ".".join(map(str, LEAST_VERSION))
    assert said == [f"ONNX Runtime {version} is too old: this library needs {least} or later".encode()]


def test_one_session_from_several_threads(library: str) -> None:
    c = body.config(capacity_tokens=12)
    session = body.session(body.node_model(c, torch.float32), library=library)
    generator = np.random.default_rng(0)

    def feeds(batch: int, tokens: int) -> dict[str, np.ndarray]:
        sizes = {"B": batch, "T": tokens, "N": 3}
        found = {}
        for info in session.get_inputs():
            shape = [sizes.get(d, d) for d in info.shape]
            past = info.name.startswith("past_")
            found[info.name] = (np.zeros if past else generator.standard_normal)(shape).astype(np.float32)
        return found | {"past_length": np.zeros(batch, np.int64), "new_tokens": np.full(batch, tokens, np.int64)}

    calls = [feeds(1, 9), feeds(3, 2)]
    expected = [session.run(["output"], call)[0] for call in calls]

    def repeat(i: int) -> bool:
        return all(np.array_equal(session.run(["output"], calls[i])[0], expected[i]) for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(repeat, (0, 1)))


def one_call(library: str, **changes: Any) -> Any:
    c = body.config(capacity_tokens=12)
    runner = body.Runner(c, torch.float32, 2, False, library=library)
    feeds, *_ = next(iter(body.steps(c, [5], torch.float32, 2)))
    return runner(feeds | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"past_length": torch.tensor([0, 60])}, "sequence 1 grows to 65 tokens"),
        ({"new_tokens": torch.tensor([5, 6])}, "new_tokens 6"),
        ({"past_length": torch.tensor([-1, 0])}, "past_length -1"),
        # Sums that have no place in 64 bits.
        ({"past_length": torch.tensor([2**63 - 1, 0])}, "sequence 0 has past_length 9223372036854775807"),
        ({"past_length": torch.tensor([0, 2**62]), "new_tokens": torch.tensor([5, 2**62])}, "past_length 461168601"),
        ({"new_tokens": torch.tensor([5, 2**63 - 1])}, "new_tokens 9223372036854775807"),
        ({"feature_k_weight": torch.zeros(6, 7, 8)}, "feature_k_weight: expected"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused(library: str, changes: dict[str, Any], message: str) -> None:
    if "feature_k_weight" in changes:  # ONNX Runtime would refuse it by the graph's shapes
        model = body.node_model(body.config(), torch.float32)
        for info in model.graph.input:
            if info.name == "feature_k_weight":
                info.type.tensor_type.shape.dim[1].dim_value = 7
        session = body.session(model, library=library)
        feeds = {
            i.name: np.zeros(
                [{"B": 1, "T": 1, "N": 4}.get(d, d) for d in i.shape], np.int64 if "int" in i.type else np.float32
            )
            for i in session.get_inputs()
        }
        with pytest.raises(Exception, match=message):
            session.run(None, feeds)
        return
    with pytest.raises(Exception, match=message):
        one_call(library, **changes)


@pytest.mark.parametrize("rank", [0, 9])
def test_another_rank_in_the_place_of_an_optional_input_is_refused(library: str, rank: int) -> None:
    """A scalar has a shape, of no dimensions: it is not absent, and not [H] or [B, T, H, D] either."""
    for name, c in (("gate", body.config()), ("window_factor", body.config(window_factor=(0.5,) * 6))):
        model = body.node_model(c, torch.float32)
        for info in model.graph.input:
            if info.name == name:
                del info.type.tensor_type.shape.dim[:]
                for _ in range(rank):
                    info.type.tensor_type.shape.dim.add().dim_value = 1
        session = body.session(model, library=library)
        feeds = {
            i.name: np.zeros(
                [{"B": 1, "T": 1, "N": 4}.get(d, d) for d in i.shape], np.int64 if "int" in i.type else np.float32
            )
            for i in session.get_inputs()
        }
        expected = r"expected \[.*H=6.*, got \[\]" if rank == 0 else r"rank 9 is outside 0\.\.8"
        with pytest.raises(Exception, match=f"{name}: {expected}"):
            session.run(None, feeds)


def test_unknown_attribute_value_and_dtype_are_refused_at_creation(library: str) -> None:
    model = body.node_model(body.config(), torch.float32)
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "feature_map":
            attribute.s = b"cosine"
    with pytest.raises(Exception, match='feature_map="cosine" is unknown; known: np_softmax_pm'):
        body.session(model, library=library)
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "feature_map":
            attribute.s = b"np_softmax_pm"
        if attribute.name == "chunk_size":
            attribute.i = 0
    with pytest.raises(Exception, match=r"chunk_size=0 is outside 1\.\.16777216"):
        body.session(model, library=library)
    with pytest.raises(Exception, match="bfloat16"):
        body.session(body.node_model(body.config(), torch.bfloat16), library=library)
