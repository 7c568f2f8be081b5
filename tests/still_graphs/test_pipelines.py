"""Pipelines as wholes."""

from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest

from still_export.targets.registry import target_of
from still_graphs.errors import ConfigError, UnsupportedError
from still_graphs.ops import DOMAIN, OPS
from still_graphs.pipelines import CPU, CUDA, PLUGINS, Pass, passes_of_ops
from tests.still_graphs.passes import run_passes
from tests.still_graphs.protos import opset_version, walk_nodes
from tests.still_graphs.small_graph import small_graph
from tests.still_graphs.test_passes_trt import assert_same, rollout


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_graph_for_tensorrt_8_is_valid_and_typed(dtype: str, one_row: bool) -> None:
    model = small_graph(dtype)
    traits = {"one row"} if one_row else set()
    counts = run_passes(model, target_of("trt8").passes, traits=traits)
    assert list(counts) == [s.name for s in target_of("trt8").passes if set(s.only) <= traits]
    assert counts["sum_in_float32"] == (4 if dtype == "float16" else 0)
    without = [name for name, count in counts.items() if not count and name != "sum_in_float32"]
    assert without == [
        "norm_in_place",
        "fix_shapes",
        "fuse_linear_layers",
        "fuse_feed_forward",
        "fuse_norms",
        "fuse_gates",
        "fuse_rotary",
        "fuse_rounding",
        "shape_before_widening",
        "widen_sigmoids",
        "reduce_angles",
    ], "it has none"
    assert opset_version(model) == 17 and not model.functions
    onnx.checker.check_model(model)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True)  # every value but the plugin's outputs
    typed = {i.name for i in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)}
    (node,) = [n for n in model.graph.node if n.op_type == "HybridAttention"]
    computed = {o for n in model.graph.node for o in n.output}
    assert computed - typed <= set(node.output)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_graph_for_tensorrt_10_has_no_plugin_but_attention(dtype: str) -> None:
    model = small_graph(dtype)
    counts = run_passes(model, target_of("trt").passes)
    assert counts["sum_products_in_float32"] == (4 if dtype == "float16" else 0)
    assert opset_version(model) == 21 and not model.functions
    assert [n.op_type for n in model.graph.node if n.domain == DOMAIN] == ["HybridAttention"]
    onnx.checker.check_model(model)


def test_trt_rtx_graph_has_no_op_of_ours_and_keeps_every_output() -> None:
    expected = rollout(small_graph())
    model = small_graph()
    run_passes(model, target_of("trt-rtx").passes)
    assert not [n for n in walk_nodes(model.graph) if n.domain == DOMAIN or n.op_type in ("NonZero", "If")]
    assert_same(model, expected, 1e-5)


def test_dump_sees_every_pass() -> None:
    seen: list[str] = []
    run_passes(small_graph(), target_of("trt").passes, lambda name, model: seen.append(name))
    assert seen == [s.name for s in target_of("trt").passes if not s.only]


def test_a_pass_that_loses_a_value_is_named() -> None:
    def lose(model: ir.Model) -> int:
        (node,) = [n for n in model.graph if n.domain == DOMAIN]
        model.graph.remove(node)
        return 1

    with pytest.raises(
        UnsupportedError, match=r"after the pass lose the graph has the .* that nothing before it makes"
    ):
        run_passes(small_graph(), [Pass(lose, "it is wrong")])


def test_a_pass_that_breaks_its_promise_is_named() -> None:
    steps = [replace(s, run=lambda model: 0) if s.name == "lower_opset" else s for s in target_of("trt").passes]
    with pytest.raises(
        UnsupportedError, match=r"after the pass <lambda> the graph has opset 23, above 21\. .*--dump-dir"
    ):
        run_passes(small_graph(), steps)


def test_a_graph_that_a_pass_cannot_take_is_refused_before_it() -> None:
    model = small_graph()
    next(n for n in model.graph.node if n.domain == DOMAIN).op_type = "HybridMixer"
    with pytest.raises(UnsupportedError, match="before the pass strip_functions the graph has nodes of the unknown op"):
        run_passes(model, target_of("trt").passes)


def test_unknown_targets_are_listed() -> None:
    with pytest.raises(ConfigError, match="--to tensorrt is unknown; known: onnx, genai, web, trt, trt-rtx"):
        target_of("tensorrt")


@pytest.mark.parametrize("op", OPS)
def test_an_op_may_be_gone(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of others that come after its own do not need it."""
    every = [passes_of_ops(host) for host in (PLUGINS, CUDA, CPU)]
    monkeypatch.delitem(OPS, op)
    for before, host in zip(every, (PLUGINS, CUDA, CPU), strict=True):
        left = passes_of_ops(host)
        assert set(left) <= set(before)
