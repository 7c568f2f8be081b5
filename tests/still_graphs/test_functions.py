"""The function body of still::HybridAttention against the stateful PyTorch form: outputs and every state tensor."""

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
from tests.still_graphs import node_model as nodes
from tests.still_graphs.node_model import WRONG_COUNTS, close, refused, session
from tests.still_graphs.passes import attach_functions
from tests.tolerances import REFERENCE

# Whole rows, single steps over a promotion, ragged rows, rows without tokens, a call longer than the window.
SPLITS: list[int | list[int]] = [5, 3, 1, 1, 1, 1, 1, 7, [0, 3], [2, 9], [1, 1], [1, 0], 16, 4, 1, 1, 1, 1, 1, [1, 1]]


def config(**changes: Any) -> HybridAttentionConfig:
    values: dict[str, Any] = dict(
        num_heads=6, num_kv_heads=2, head_dim=8, chunk_size=4, salient_per_chunk=3, feature_dim=5, capacity_tokens=64
    )
    return HybridAttentionConfig(**{**values, **changes})


def node_model(c: HybridAttentionConfig, dtype: torch.dtype, layers: int = 1, opset: int = 23) -> onnx.ModelProto:
    """A model of `layers` nodes in a row, each of which feeds the next one's query, bodies attached."""
    sizes = {
        "C": c.chunk_size, "2*C": 2 * c.chunk_size, "H": c.num_heads, "HK": c.num_kv_heads, "HS": c.select_heads,
        "D": c.head_dim, "D/4": c.head_dim // 4, "P": c.projection_dim, "F": c.state_features,
    }  # fmt: skip
    absent = {"gate": c.gate == "none", "window_factor": c.window_factor is None}
    lacks = tuple(name for name, missing in absent.items() if missing)
    return nodes.node_model(HYBRID_ATTENTION, sizes, dtype, lacks, opset, layers=layers, **c.attributes())


class Runner(nodes.NodeOfStates):
    """Runs one node; outputs and states of each call."""

    def __init__(
        self, c: HybridAttentionConfig, dtype: torch.dtype, batch: int, in_place: bool, opset: int = 23, **options: Any
    ) -> None:
        state = HybridAttentionState.empty(c, batch, dtype).tensors()
        state.pop("length")
        super().__init__(node_model(c, dtype, opset=opset), state, in_place, **options)

    def __call__(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"output": super().__call__(feeds, feeds["query"]), **self.states()}


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


def check(
    c: HybridAttentionConfig,
    splits: list[int | list[int]] = SPLITS,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    **options: Any,
) -> None:
    runner = Runner(c, dtype, 2, in_place, **options)
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


FOLDING = [*SPLITS, 37, [20, 3], 1, 1, 1, 1, 1]
CASES: list[tuple[dict[str, Any], list[int | list[int]], dict[str, Any]]] = [
    *((knobs, SPLITS, {}) for knobs in KNOBS),
    (
        {"feature_map": "identity"},
        SPLITS,
        {},
    ),  # positive inputs: with features of both signs the denominator may come close to 0
    *(
        ({"overflow": "fold_oldest", "capacity_tokens": 20, **knobs}, FOLDING, {"in_place": True})
        for knobs in (
            {},
            {"select_scope": "kv_group_mean"},
            {"local": "sliding"},
            {"capacity_tokens": 8},
            {"cache": "int8"},
        )
    ),
    *(({}, SPLITS, {"dtype": dtype}) for dtype in (torch.float16, torch.bfloat16)),
    ({}, SPLITS, {"in_place": True}),
    ({"capacity_tokens": 8}, [3, 1, 1, 2, 1], {}),  # a cache without slots
    (
        {"chunk_size": 64, "salient_per_chunk": 4, "head_dim": 16, "capacity_tokens": 1000},
        [130, 1, 1, 1, 59, 1, 1, [1, 61], [0, 1], [3, 70], 1, 200],
        {"in_place": True, "opset": 24},
    ),
]


@pytest.mark.parametrize("knobs, splits, options", CASES, ids=str)
def test_body_equals_stateful_form(
    knobs: dict[str, Any], splits: list[int | list[int]], options: dict[str, Any]
) -> None:
    check(config(**knobs), splits, **options)


def test_states_may_be_in_place() -> None:
    assert all(s.in_place for s in HYBRID_ATTENTION.states)


def test_logits_far_apart() -> None:
    # Gaps beyond exp's range: scores must come from their own window's maximum, not from the row's.
    runner = Runner(config(), torch.float32, 2, False)
    for feeds, expected, split in steps(config(), [5, 1, 1, 9, 1, 1, [3, 1]], torch.float32, 2, 400.0):
        found = runner(feeds)
        for name, tensor in found.items():
            close(tensor, expected[name], REFERENCE[torch.float32], f"{name} after {split}")


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


def two_kinds_of_nodes() -> onnx.ModelProto:
    """Two nodes of other attributes."""
    model = node_model(config(), torch.float32, 2)
    del model.functions[:]
    for attribute in model.graph.node[1].attribute:
        if attribute.name == "mix_epsilon":
            attribute.f = 0.25
    assert attach_functions(model) == 2
    return model


def filled(session: Any, tokens: int = 3) -> dict[str, np.ndarray]:
    """A call of one sequence: ones, and states of zeros."""
    sizes, feeds = {"B": 1, "T": tokens, "N": 4}, {}
    for info in session.get_inputs():
        kind = np.int64 if "int64" in info.type else np.float32
        feeds[info.name] = np.full([sizes.get(d, d) for d in info.shape], not info.name.startswith("past_"), kind)
    feeds["new_tokens"][:] = tokens
    return feeds


def test_different_nodes_get_functions_of_their_own() -> None:
    model = two_kinds_of_nodes()
    assert [n.overload for n in model.graph.node] == ["", "1"]
    onnx.checker.check_model(model)
    runner = session(model)
    first, second = runner.run(["output.0", "output.1"], filled(runner))
    # All values are 1: the mix is 1 but for epsilon in the denominator.
    assert first[0, 0, 0, 0] == pytest.approx(1.0, abs=1e-5)
    assert second[0, 0, 0, 0] == pytest.approx(1 / 1.25, abs=1e-5)


@pytest.mark.parametrize("changes", WRONG_COUNTS, ids=str)
@pytest.mark.parametrize("tokens", [5, 1])
def test_counts_out_of_range_are_refused(changes: dict[str, list[int]], tokens: int) -> None:
    """In either branch; with numbers whose sum has no place in 64 bits, too."""
    if tokens == 1 and any(count == 5 for count in changes.get("new_tokens", ())):
        changes = {"new_tokens": [min(count, 1) if count == 5 else count for count in changes["new_tokens"]]}
    c = config(capacity_tokens=12)
    runner = Runner(c, torch.float32, 2, False)
    feeds, *_ = next(iter(steps(c, [tokens], torch.float32, 2)))
    with refused():
        runner(feeds | {name: torch.tensor(counts) for name, counts in changes.items()})


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
    assert node.input[-1] == "past_z_state" and node.output[-1] == "present_z_state", "absent ones are not named"
    assert len(model.functions[0].input) == len(node.input)
    del model.functions[:]
    node.input.append("past_z_state")
    with pytest.raises(UnsupportedError, match=r"past_z_state are beyond the 16 tensors of the op"):
        attach_functions(model)
