"""A graph whose layers were traced once a kind is the graph of all layers, node for node, in every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from still_export.graph.lower import lower_program, portable_graph
from still_export.graph.repeat import LayersDiffer, only
from still_export.graph.trace import trace_model
from still_export.models.load import load_model
from tests.still_export.expert_models import DEEP, deep_model
from tests.still_export.tiny import FAMILIES, still_model

TYPES = ("hybrid_attention", "full_attention", *["hybrid_attention"] * 3, "full_attention", "full_attention")
FEW = ("llama",)


def described(model: ir.Model) -> dict[str, Any]:
    """What each node is and reads, by what is told of its results: names of inputs, outputs and weights, and how the others are made."""
    values: dict[ir.Value | None, object] = {None: None}
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        tensor = value.const_value
        inside = tensor is not None and not isinstance(tensor, ir.LazyTensor)
        content = tensor.numpy().tolist() if tensor is not None and inside else value.name
        values[value] = hash((str(content), str(value.shape), str(value.dtype)))
    nodes = []
    for node in model.graph:
        given = [values[value] for value in node.inputs]
        if node.op_type == "Shape" and "end" in node.attributes and node.attributes["end"].as_int() == 1:
            given = ["batch"]  # of whichever state torch asks for it
        attributes = sorted((a.name, str(a.value)) for a in node.attributes.values())
        nodes.append(hash((node.domain, node.op_type, str(attributes), str(given))))
        values |= {v: hash((nodes[-1], n, str(v.shape), str(v.dtype))) for n, v in enumerate(node.outputs) if v.name}
    results = {value.name: values[value] for value in model.graph.outputs}
    names = [[str(v.name) for v in each] for each in (model.graph.inputs, model.graph.outputs)]
    weights = [name for name, v in model.graph.initializers.items() if isinstance(v.const_value, ir.LazyTensor)]
    return {"nodes": sorted(nodes), "results": results, "names": names, "weights": weights}


def check(model: Any, traced: int) -> None:
    few, whole = trace_model(model), trace_model(model, whole=True)
    assert len(set(few.alike)) == traced and len(set(whole.alike)) == len(model.model.layers)
    assert described(lower_program(few)) == described(lower_program(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FEW else pytest.mark.long) for f in FAMILIES], ids=str
)
def test_softmax_families(family: str) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": len(TYPES)}
    if family == "smollm3":
        sizes["no_rope_layers"] = [1, 0, 1, 1, 1, 1, 1]
    if family == "gemma3_text":
        sizes["layer_types"] = [("full_attention", "sliding_attention")[kind == "full_attention"] for kind in TYPES]
    factors = [[float(layer + head) for head in range(6)] for layer in range(len(TYPES))]
    model = still_model(family, torch.float32, sizes=sizes, layer_types=TYPES, window_factors=factors)
    check(model, 5 if family == "smollm3" else 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("lfm2", "bamba") else pytest.mark.long) for f in DEEP]
)
def test_linear_families(family: str, tmp_path: Path) -> None:
    deep_model(family).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    check(model, len(set(trace_model(model).alike)))


class Returning(torch.nn.Module):
    """A layer that returns hidden states and `others`."""

    def __init__(self, own: torch.nn.Module, others: Sequence[Any] | None) -> None:
        super().__init__()
        self.own, self.others = own, others

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.own(hidden, *args, **kwargs)
        return result if self.others is None else (result, *self.others)


class Unpacking(torch.nn.Module):
    """A layer as its model calls it: takes what `Returning` returns apart, as that layer's own code does."""

    def __init__(self, others: Sequence[Any] | None) -> None:
        super().__init__()
        self.others = others

    def forward(self, result: Any) -> torch.Tensor:
        if self.others is None:
            assert isinstance(result, torch.Tensor)
            return result
        hidden, *others = result
        assert len(others) == len(self.others)
        return hidden  # type: ignore[no-any-return]


@pytest.mark.parametrize("others", [None, (), (None,), (None, None, None)], ids=str)
def test_a_skipped_layer_returns_what_its_kind_returns(others: Sequence[Any] | None) -> None:
    layers = torch.nn.ModuleList(Returning(torch.nn.Linear(4, 4), others) for _ in range(5))
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = layers
    x, take = torch.ones(2, 4), Unpacking(others)
    with only(model, [0, 1, 1, 1, 1]) as hidden:
        state = x
        for layer in model.model.layers:
            state = take(layer(state))
    expected = layers[1].own(layers[0].own(x))
    assert torch.equal(state, expected) and len(hidden.states) == 3


def test_layers_that_return_more_are_all_traced() -> None:
    layers = torch.nn.ModuleList(Returning(torch.nn.Linear(4, 4), (torch.ones(1),)) for _ in range(3))
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = layers
    with only(model, [0, 1, 1]), pytest.raises(LayersDiffer):
        model.model.layers[0](torch.ones(2, 4))


class Remembering(torch.nn.Module):
    """Adds what the first layer computed to what all of them do."""

    def __init__(self, own: torch.nn.Module, first: bool, remember: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__()
        self.own, self.first, self._remember = own, first, remember

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.own(hidden)
        if self.first:
            self._remember()[:] = [result]
        return result + self._remember()[0]


@pytest.mark.slow
@pytest.mark.long
def test_layers_that_read_one_another_are_all_traced() -> None:
    def model() -> Any:
        made, memory = still_model("llama", torch.float32, sizes={"num_hidden_layers": 4}), list[torch.Tensor]()
        for index, layer in enumerate(made.model.layers):
            layer.mlp = Remembering(layer.mlp, index == 0, lambda: memory)
        return made

    with pytest.raises(LayersDiffer, match="of another layer"):
        lower_program(trace_model(model()))
    assert len(portable_graph(model()).graph) == len(lower_program(trace_model(model(), whole=True)).graph)
