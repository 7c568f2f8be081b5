"""The function body of still::HybridAttention against the stateful PyTorch form: outputs and every state tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions import function_body
from still_graphs.ops import DOMAIN
from still_kernels.codes import rounded
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from tests.still_graphs.steps import attach_functions
from tests.tolerances import REFERENCE

ort = pytest.importorskip("onnxruntime")

ELEMENT = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}
# Whole rows, single steps over a promotion, ragged rows, rows without tokens, a call longer than the window.
SPLITS: list[int | list[int]] = [5, 3, 1, 1, 1, 1, 1, 7, [0, 3], [2, 9], [1, 1], [1, 0], 16, 4, 1, 1, 1, 1, 1, [1, 1]]


def config(**changes: Any) -> HybridAttentionConfig:
    values: dict[str, Any] = dict(
        num_heads=6, num_kv_heads=2, head_dim=8, chunk_size=4, salient_per_chunk=3, feature_dim=5, capacity_tokens=64
    )
    return HybridAttentionConfig(**{**values, **changes})


def node_model(c: HybridAttentionConfig, dtype: torch.dtype, layers: int = 1, opset: int = 23) -> onnx.ModelProto:
    """A model of `layers` still nodes in a row (each feeds the next one's query), bodies attached."""
    sizes = {
        "C": c.chunk_size, "2*C": 2 * c.chunk_size, "H": c.num_heads, "HK": c.num_kv_heads, "HS": c.select_heads,
        "D": c.head_dim, "D/4": c.head_dim // 4, "P": c.projection_dim, "F": c.state_features,
    }  # fmt: skip
    kinds = {"T": ELEMENT[dtype], "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}
    absent = {"gate": c.gate == "none", "window_factor": c.window_factor is None}
    there = {s.name: s for s in HYBRID_ATTENTION.states_with(c.attributes())}
    absent |= {s.name: s.name not in there for s in HYBRID_ATTENTION.states}
    shared = {"new_tokens", "past_length"}
    inputs, outputs, nodes = {}, [], []
    for layer in range(layers):
        names: list[list[str]] = [[], []]
        for side, tensors in enumerate(
            (
                [(t, t.name) for t in HYBRID_ATTENTION.inputs]
                + [(s, f"past_{s.name}") for s in HYBRID_ATTENTION.states],
                [(t, t.name) for t in HYBRID_ATTENTION.outputs]
                + [(s, f"present_{s.name}") for s in HYBRID_ATTENTION.states],
            )
        ):
            for tensor, name in tensors:
                if absent.get(tensor.name):
                    names[side].append("")
                    continue
                tensor = there.get(tensor.name, tensor)
                full = name if name in shared else f"{name}.{layer}"
                if side == 0 and name == "query" and layer:
                    full = f"output.{layer - 1}"
                names[side].append(full)
                info = helper.make_tensor_value_info(full, kinds[tensor.dtype], [sizes.get(d, d) for d in tensor.shape])
                if side:
                    outputs.append(info)
                elif not full.startswith("output"):
                    inputs[full] = info
        nodes.append(helper.make_node("HybridAttention", *names, domain=DOMAIN, **c.attributes()))
    graph = helper.make_graph(nodes, "still", list(inputs.values()), outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    assert attach_functions(model) == 1
    return model


def session(model: onnx.ModelProto, save: str = "", library: str = "", threads: int = 1) -> Any:
    """A session of `model`; with `library` its kernels win over the bodies."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(library)
    options.log_severity_level = 3
    if save:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = save
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def value(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        raw = tensor.contiguous().view(torch.uint16).numpy()
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())


class Runner:
    """Runs a one-layer model over IOBinding; with `in_place` past and present of each state are one buffer, else present starts as NaN."""

    def __init__(
        self,
        c: HybridAttentionConfig,
        dtype: torch.dtype,
        batch: int,
        in_place: bool,
        opset: int = 23,
        library: str = "",
        threads: int = 1,
    ) -> None:
        self.session = session(node_model(c, dtype, opset=opset), library=library, threads=threads)
        self.dtype, self.in_place = dtype, in_place
        state = HybridAttentionState.empty(c, batch, dtype).tensors()
        state.pop("length")
        self.kinds = {name: t.dtype for name, t in state.items()}
        self.state = {name: value(t.clone()) for name, t in state.items()}

    def __call__(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        binding = self.session.io_binding()
        held = {name: value(tensor) for name, tensor in feeds.items()}  # a binding does not keep them alive
        for name, given in held.items():
            binding.bind_ortvalue_input(name if name in ("new_tokens", "past_length") else f"{name}.0", given)
        for name, past in self.state.items():
            binding.bind_ortvalue_input(f"past_{name}.0", past)
        names = [o.name for o in self.session.get_outputs()]
        for name in names:
            if self.in_place and name != "output.0":
                binding.bind_ortvalue_output(name, self.state[name[8:-2]])
            else:
                like = (
                    feeds["query"]
                    if name == "output.0"
                    else self._tensor(self.state[name[8:-2]], self.kinds[name[8:-2]])
                )
                held[name] = value(torch.full_like(like, torch.nan if like.is_floating_point() else 77))
                binding.bind_ortvalue_output(name, held[name])
        self.session.run_with_iobinding(binding)
        if not self.in_place:
            self.state = {name: held[f"present_{name}.0"] for name in self.state}
        result = {"output": self._tensor(held["output.0"], self.dtype)}
        return result | {n: self._tensor(v, self.kinds[n]) for n, v in self.state.items()}

    @staticmethod
    def _tensor(found: Any, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.bfloat16:
            raw = torch.utils.dlpack.from_dlpack(found._ortvalue.to_dlpack())
            return raw.clone()
        return torch.from_numpy(found.numpy().copy())


_steps: dict[str, list[Any]] = {}
"""By what is asked: in place and apart, and by as many threads, the same."""


def steps(*asked: Any) -> list[Any]:
    """Inputs of each call, padding poisoned with NaN, and what the PyTorch form makes of them; arguments as of `make_steps`."""
    if repr(asked) not in _steps:
        _steps[repr(asked)] = list(make_steps(*asked))
    return [(dict(feeds), expected, split) for feeds, expected, split in _steps[repr(asked)]]


def make_steps(
    c: HybridAttentionConfig, splits: list[int | list[int]], dtype: torch.dtype, batch: int, sharpness: float = 2.0
) -> Iterator[Any]:
    """As of `steps`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator).to(dtype)
        return x.abs() if c.feature_map == "identity" else x

    weights = {f"feature_{n}_weight": normal(c.num_heads, c.projection_dim, c.head_dim) for n in "qk"}
    state = HybridAttentionState.empty(c, batch, dtype)
    for split in splits:
        new = torch.tensor(split if isinstance(split, list) else [split] * batch)
        tokens = max(int(new.max()), 1)
        feeds = {
            "query": sharpness * normal(batch, tokens, c.num_heads, c.head_dim),
            "key": normal(batch, tokens, c.num_kv_heads, c.head_dim),
            "value": normal(batch, tokens, c.num_kv_heads, c.head_dim),
        }
        if c.cache == "int8":
            feeds |= {name: rounded(feeds[name]) for name in ("key", "value")}
        if c.gate == "channel":
            feeds["gate"] = torch.sigmoid(normal(batch, tokens, c.num_heads, c.head_dim))
        inputs = Inputs(**{"gate": None, **feeds, **weights}, new_tokens=new)
        expected, after = chunked_hybrid_attention(inputs, c, state)
        for tensor in feeds.values():
            for row, count in enumerate(new.tolist()):
                tensor[row, count:] = torch.nan
        feeds |= {**weights, "new_tokens": new, "past_length": state.length}
        if c.window_factor is not None:
            feeds["window_factor"] = torch.tensor(c.window_factor)
        yield feeds, {"output": expected, **after.tensors()}, split
        state = after


def close(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    assert found.shape == expected.shape, what
    if found.dtype == torch.int32:  # words of codes
        assert torch.equal(found.view(torch.int8), expected.view(torch.int8)), what
        return
    found, expected = found.float(), expected.float()
    assert torch.equal(found.isinf(), expected.isinf()), what
    finite = ~expected.isinf()
    scale = max(1.0, float(expected[finite].abs().max())) if bool(finite.any()) else 1.0
    error = float((found - expected)[finite].abs().max()) if bool(finite.any()) else 0.0
    assert error <= bound * scale, f"{what}: {error:.2e}"  # NaN fails too


def check(
    c: HybridAttentionConfig,
    splits: list[int | list[int]] = SPLITS,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    opset: int = 23,
    library: str = "",
    threads: int = 1,
) -> None:
    runner = Runner(c, dtype, 2, in_place, opset, library, threads)
    for feeds, expected, split in steps(c, splits, dtype, 2):
        found = runner(feeds)
        for name, tensor in found.items():
            close(tensor, expected[name], REFERENCE[dtype], f"{name} after {split}")


KNOBS: list[dict[str, Any]] = [
    {},
    {"select_scope": "kv_group_max"},
    {"select_scope": "kv_group_mean"},
    {"gate": "none"},
    {"salient_per_chunk": 0},
    {"salient_per_chunk": 1},
    {"salient_per_chunk": 4},
    {"profile": "released"},
    {"phantom_first_chunk": True},
    {"window_factor": (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)},
    {"mix_epsilon": 0.1},
    {"num_kv_heads": 6, "feature_dim": None},
    *({"feature_map": name} for name in ("softmax_pm", "softmax", "relu", "elu_plus_one")),
    {"local": "sliding"},
    {"local": "sliding", "select_scope": "kv_group_max"},
    {"local": "sliding", "window_size": 3, "salient_per_chunk": 0},
    {"cache": "int8"},
    {"cache": "int8", "select_scope": "kv_group_mean", "local": "sliding"},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_body_equals_stateful_form(knobs: dict[str, Any]) -> None:
    check(config(**knobs))


def test_identity_features() -> None:
    # Positive inputs: with features of both signs the denominator may come close to 0.
    check(config(feature_map="identity"))


@pytest.mark.parametrize(
    "knobs",
    [
        {"capacity_tokens": 20},
        {"capacity_tokens": 20, "select_scope": "kv_group_mean"},
        {"capacity_tokens": 20, "local": "sliding"},
        {"capacity_tokens": 8},
        {"capacity_tokens": 20, "cache": "int8"},
    ],
    ids=str,
)
def test_overflow(knobs: dict[str, Any]) -> None:
    check(config(overflow="fold_oldest", **knobs), [*SPLITS, 37, [20, 3], 1, 1, 1, 1, 1], in_place=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    check(config(), dtype=dtype)


def test_logits_far_apart() -> None:
    # Gaps beyond exp's range: scores must come from their own window's maximum, not from the row's.
    runner = Runner(config(), torch.float32, 2, False)
    for feeds, expected, split in steps(config(), [5, 1, 1, 9, 1, 1, [3, 1]], torch.float32, 2, 400.0):
        found = runner(feeds)
        for name, tensor in found.items():
            close(tensor, expected[name], REFERENCE[torch.float32], f"{name} after {split}")


def test_states_in_place() -> None:
    assert all(s.in_place for s in HYBRID_ATTENTION.states)
    check(config(), in_place=True)


def test_cache_without_slots() -> None:
    check(config(capacity_tokens=8), [3, 1, 1, 2, 1])


def test_default_geometry_over_chunk_boundaries() -> None:
    c = config(chunk_size=64, salient_per_chunk=4, head_dim=16, capacity_tokens=1000)
    check(c, [130, 1, 1, 1, 59, 1, 1, [1, 61], [0, 1], [3, 70], 1, 200], in_place=True, opset=24)


def test_steps_of_many_layers_share_their_indices(tmp_path: Any) -> None:
    """What depends on counts only is computed once, not once a layer: it would cost more than the attention."""
    sizes = []
    for layers in (2, 6):
        path = str(tmp_path / f"{layers}.onnx")
        session(node_model(config(), torch.float32, layers), save=path)
        optimized = onnx.load(path)
        sizes.append(len(optimized.graph.node))
    assert (sizes[1] - sizes[0]) / 4 <= 7
    branch = next(n for n in optimized.graph.node if n.op_type == "If")
    short = next(a.g for a in branch.attribute if a.name == "then_branch")
    assert len(short.node) <= 60


def test_different_nodes_get_functions_of_their_own() -> None:
    model = node_model(config(), torch.float32, 2)
    del model.functions[:]
    for attribute in model.graph.node[1].attribute:
        if attribute.name == "mix_epsilon":
            attribute.f = 0.25
    assert attach_functions(model) == 2
    assert [n.overload for n in model.graph.node] == ["", "1"]
    onnx.checker.check_model(model)
    feeds = {}
    for info in session(model).get_inputs():
        shape = [{"B": 1, "T": 3, "N": 4}.get(d, d) for d in info.shape]
        feeds[info.name] = np.ones(shape, np.int64 if "int64" in info.type else np.float32)
    feeds["new_tokens"][:], feeds["past_length"][:] = 3, 0
    feeds = {n: v * 0 if n.startswith("past_") else v for n, v in feeds.items()}
    first, second = session(model).run(["output.0", "output.1"], feeds)
    # All values are 1: the mix is 1 but for epsilon in the denominator.
    assert first[0, 0, 0, 0] == pytest.approx(1.0, abs=1e-5)
    assert second[0, 0, 0, 0] == pytest.approx(1 / 1.25, abs=1e-5)


WRONG_COUNTS: list[dict[str, list[int]]] = [
    {"past_length": [0, -1]},
    {"past_length": [-4, 5]},
    {"past_length": [0, -(2**62)]},
    {"past_length": [0, 2**63 - 1]},
    {"past_length": [0, 60]},  # more than the cache has slots for
    {"new_tokens": [5, -1]},
    {"new_tokens": [5, 6]},
    {"new_tokens": [5, 2**31]},
    {"new_tokens": [5, 2**63 - 1]},
    {"past_length": [2**62, 2**62], "new_tokens": [2**62, 2**62]},
]


@pytest.mark.parametrize("changes", WRONG_COUNTS, ids=str)
@pytest.mark.parametrize("tokens", [5, 1])
def test_counts_out_of_range_are_refused(changes: dict[str, list[int]], tokens: int) -> None:
    """In either branch; with numbers whose sum has no place in 64 bits, too."""
    if tokens == 1 and any(count == 5 for count in changes.get("new_tokens", ())):
        changes = {"new_tokens": [min(count, 1) if count == 5 else count for count in changes["new_tokens"]]}
    c = config(capacity_tokens=12)
    runner = Runner(c, torch.float32, 2, False)
    feeds, *_ = next(iter(steps(c, [tokens], torch.float32, 2)))
    ort.set_default_logger_severity(4)
    try:
        with pytest.raises(Exception, match=r"out_of_range|invalid indice"):
            runner(feeds | {name: torch.tensor(counts) for name, counts in changes.items()})
    finally:
        ort.set_default_logger_severity(2)


def test_unknown_op_type_and_opset_are_refused() -> None:
    node = helper.make_node("Mystery", [], [], domain=DOMAIN)
    with pytest.raises(UnsupportedError, match="HybridAttention"):
        function_body(node, TensorProto.FLOAT, dims={})
    node.op_type = "HybridAttention"
    with pytest.raises(UnsupportedError, match="DOUBLE"):
        function_body(node, TensorProto.DOUBLE, dims={})
    with pytest.raises(UnsupportedError, match="opset 17"):
        function_body(node, TensorProto.FLOAT, 17, dims={})
    with pytest.raises(UnsupportedError, match="dimension HK"):
        function_body(node, TensorProto.FLOAT, 23, dims={"H": 4})


def test_scales_go_with_codes_alone() -> None:
    model = node_model(config(), torch.float32)
    (node,) = model.graph.node
    assert node.input[-1] == "past_z_state.0" and node.output[-1] == "present_z_state.0", "absent ones are not named"
    assert len(model.functions[0].input) == len(node.input)
    del model.functions[:]
    node.input.append("past_z_state.0")
    with pytest.raises(UnsupportedError, match=r"past_z_state.0 are beyond the 16 tensors of the op"):
        attach_functions(model)
