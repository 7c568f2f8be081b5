"""The static cache: the tokens of the dynamic one, in one graph that asks the host nothing; and what a step costs the host in eager."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache

from still_export.errors import CapacityError, ShapeError, UnsupportedError
from still_export.mixers.cache import StillCache
from still_export.mixers.config import StillConfig
from still_export.models import attach_untrained
from still_export.models.build import build_model, family_of, still_family_config
from still_kernels import launcher
from still_kernels.hybrid_attention import call as dispatch
from tests.still_export.linear_models import linear_model
from tests.still_export.tiny import CHUNK, MIXED, family_config, padded, random_ids, still_model

GREEDY = {"do_sample": False, "max_new_tokens": 3 * CHUNK + 2}


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids, mask = padded([row.flip(0) for row in rows])
    return ids.flip(1), mask.flip(1)


def tensors_of(cache: StillCache) -> list[Tensor]:
    """Everything that must not move."""
    assert cache.length is not None
    return [cache.length, *(x for layer in cache.layers for x in layer.state.tensors().values())]  # type: ignore[attr-defined]


def linear(family: str) -> Any:
    """A model of a linear family."""
    plain, known = linear_model(family), family_of(family)
    config = still_family_config(known, plain.config.to_dict(), StillConfig())
    model = build_model(known, config, plain.state_dict())
    model.generation_config.eos_token_id = None
    return model


class Watched(TorchDispatchMode):
    """Names of the ops that run; an error where a value is read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step reads a value on the host"
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mixed() -> Any:
    return still_model("llama", layer_types=MIXED)


@pytest.fixture
def graphs() -> Iterator[tuple[list[Any], CompileConfig]]:
    """What Dynamo captured, and what makes transformers compile by it on a CPU; a graph break or a second graph is an error."""
    torch._dynamo.reset()
    counters.clear()
    found: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        found.append(module)
        return module

    config = CompileConfig(fullgraph=True, backend=keep, mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield found, config
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_batch_gets_the_tokens_of_the_dynamic_cache(mixed: Any, side: str) -> None:
    rows = [random_ids(1, n, seed=n)[0] for n in (19, 3, 16)]
    ids, mask = (left_padded if side == "left" else padded)(rows)
    expected = mixed.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(mixed.generate(ids, attention_mask=mask, cache_implementation="static", **GREEDY), expected)


@pytest.mark.parametrize(
    "still", [{"overflow": "fold_oldest", "capacity_tokens": 32}, {"select_scope": "kv_group_max"}]
)
def test_other_layers_get_them_too(still: dict[str, Any], graphs: tuple[list[Any], CompileConfig]) -> None:
    """Window factors lie on the device, where compiled steps find them; a cache that folds has one size."""
    factors = tuple(tuple(0.5 + 0.25 * (head + layer) for head in range(6)) for layer in range(3))
    model = still_model("qwen3", window_factors=factors, **still)
    ids = random_ids(2, 13)
    static = {"cache_implementation": "static", "compile_config": graphs[1]}
    assert torch.equal(model.generate(ids, **static, **GREEDY), model.generate(ids, **GREEDY))
    assert len(graphs[0]) == 1


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_linear_families_have_it(family: str, graphs: tuple[list[Any], CompileConfig]) -> None:
    found, compiling = graphs
    model = linear(family)
    ids, few = random_ids(2, 13), {"do_sample": False, "max_new_tokens": 6}
    made = model.generate(ids, cache_implementation="static", compile_config=compiling, **few)
    assert torch.equal(made, model.generate(ids, **few)) and len(found) == 1


def test_beams_reorder_rows_where_they_are(mixed: Any) -> None:
    ids = random_ids(2, 11)
    more = {"max_new_tokens": 9, "do_sample": False, "num_beams": 3}
    assert torch.equal(mixed.generate(ids, cache_implementation="static", **more), mixed.generate(ids, **more))
    cache = StillCache.static(mixed.config, 2, 16, torch.float64)
    with pytest.raises(UnsupportedError, match="2 sequences"):
        cache.batch_repeat_interleave(2)


def test_a_cache_is_used_again_in_its_place(mixed: Any) -> None:
    """Reset, continued, copied: always the tokens of a new dynamic one, and tensors that do not move."""
    cache = StillCache.static(mixed.config, 1, 80, torch.float64)
    places = [x.data_ptr() for x in tensors_of(cache)]
    first = mixed.generate(random_ids(1, 12), past_key_values=cache, **GREEDY)
    prompt = torch.cat([first, random_ids(1, 5, seed=9)], dim=1)
    other = copy.deepcopy(cache)
    expected = mixed.generate(prompt, max_new_tokens=10, do_sample=False)
    for each in (cache, other):
        assert torch.equal(mixed.generate(prompt, max_new_tokens=10, do_sample=False, past_key_values=each), expected)
    cache.reset()
    assert not any(x.any() for x in tensors_of(cache)) and cache.get_seq_length() == 0
    assert torch.equal(mixed.generate(random_ids(1, 12), past_key_values=cache, **GREEDY), first)
    assert [x.data_ptr() for x in tensors_of(cache)] == places


def test_too_many_tokens_are_refused_ahead(mixed: Any) -> None:
    small = still_model("llama", capacity_tokens=3 * CHUNK)
    ids = random_ids(1, 12)
    with pytest.raises(CapacityError, match=r"room for 40 tokens .* capacity_tokens=24"):
        small.generate(ids, max_length=41, cache_implementation="static")
    assert small.generate(ids, max_length=25, cache_implementation="static").shape == (1, 25)
    cache = StillCache.static(mixed.config, 1, 20, torch.float64)
    with pytest.raises(CapacityError, match="room for 20 columns and 40 are asked for"):
        mixed.generate(ids, max_length=41, past_key_values=cache)
    with torch.no_grad():
        mixed(ids, past_key_values=cache)
        with pytest.raises(CapacityError, match="room for 20 columns, has seen 12 and is to take 12 more"):
            mixed(ids, past_key_values=cache)
        with pytest.raises(ShapeError, match="1 sequences and the call 2"):
            mixed(random_ids(2, 3), past_key_values=cache)


def test_what_it_does_not_have_is_named(mixed: Any) -> None:
    with pytest.raises(UnsupportedError, match="'offloaded'"):
        mixed.generate(random_ids(1, 4), cache_implementation="offloaded", max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="prefill_chunk_size"):
        mixed.generate(random_ids(1, 4), cache_implementation="static", prefill_chunk_size=2, max_new_tokens=2)


def test_steps_are_one_graph(mixed: Any, graphs: tuple[list[Any], CompileConfig]) -> None:
    """No break, no second graph at a chunk's end or in a later call; states are written by the ops themselves."""
    found, compiling = graphs
    rows = [random_ids(1, n, seed=n)[0] for n in (19, 3)]
    ids, mask = left_padded(rows)
    expected = mixed.generate(ids, attention_mask=mask, **GREEDY)
    static = {"cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(mixed.generate(ids, attention_mask=mask, **static, **GREEDY), expected)
    shorter = mixed.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **static)
    assert torch.equal(shorter, expected[:, : ids.shape[1] + 4])
    assert len(found) == 1 and not counters["graph_break"]
    called = [str(node.target) for node in found[0].graph.nodes if "still" in str(node.target)]
    assert called == ["still.hybrid_attention_", "still.attention_", "still.hybrid_attention_"]


def test_a_compiled_step_reads_nothing_on_the_host(mixed: Any) -> None:
    """Down to ATen, where every state but the ops' own is written once, at the end."""
    torch._dynamo.reset()
    found: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        found.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    cache = StillCache.static(mixed.config, 1, 32, torch.float64)
    step = torch.compile(mixed, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with torch.no_grad():
        mixed(random_ids(1, 9), past_key_values=cache)
        step(random_ids(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 10
    assert sum("auto_functionalized" in name for name in found) == 3
    assert not [name for name in found if "_local_scalar_dense" in name or "nonzero" in name]


@pytest.mark.gpu
def test_steps_on_a_gpu_are_cuda_graphs() -> None:
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    model = still_model("llama", torch.float32, layer_types=MIXED, chunk_size=64, sizes=sizes).cuda()
    rows = [random_ids(1, n, seed=n)[0] for n in (60, 100)]
    ids, mask = (x.cuda() for x in left_padded(rows))
    more = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 80}
    expected = model.generate(ids, **more)
    torch._dynamo.reset()
    counters.clear()
    for _ in range(2):  # the second cache lies elsewhere
        made = model.generate(ids, cache_implementation="static", compile_config=CompileConfig(fullgraph=True), **more)
        assert torch.equal(made, expected)
    assert not counters["inductor"]["cudagraph_skips"]


class Kernel:
    """A compiled kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *_: None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU that take a GPU's way up to the launch."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "demand_kernel", lambda *_: None)
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher.Launcher, "start", lambda self, name, run: Kernel() if run.keywords else run())


@pytest.mark.parametrize("kind", ["hybrid_attention", "full_attention"])
def test_an_eager_step_asks_no_more_of_the_host_than_the_base(kind: str, gpu: None) -> None:
    """Ops that a layer's attention dispatches in a decode step, views included."""
    config = family_config("llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    base = AutoModelForCausalLM.from_config(config).eval()
    ours = attach_untrained(base, StillConfig(layer_types=(kind,) * 3))
    counts = []
    for model, cache in ((base, DynamicCache(config=base.config)), (ours, StillCache.empty(ours.config))):
        attention = model.model.layers[1].self_attn
        hidden = torch.zeros(1, 1, 36)
        given = dict(position_embeddings=model.model.rotary_emb(hidden, torch.zeros(1, 1)), past_key_values=cache)
        if isinstance(cache, StillCache):
            cache.progress.start(1, hidden.device)
            cache.progress.begin(cache.progress.every(1), 100)
        with torch.no_grad():
            for _ in range(2):
                attention(hidden, attention_mask=None, **given)
            with Watched() as watched:
                attention(hidden, attention_mask=None, **given)
        counts.append(len(watched.names))
    assert counts[1] <= counts[0]


def test_an_eager_step_reads_nothing_on_the_host(gpu: None) -> None:
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    model = still_model("llama", torch.float32, layer_types=MIXED, chunk_size=64, sizes=sizes)
    cache = StillCache.empty(model.config)
    with torch.no_grad():
        for _ in range(2):
            model(random_ids(1, 1), past_key_values=cache)
        ids = random_ids(1, 1)
        inputs = model.prepare_inputs_for_generation(ids, attention_mask=torch.ones(1, 3), past_key_values=cache)
        with Watched() as watched:
            model(**inputs)
    assert cache.length is not None and cache.length.tolist() == [3]
    assert not any("clone" in name for name in watched.names)
    assert all(layer._step is not None for layer in cache.layers)  # type: ignore[attr-defined]
    assert all(layer._step is None for layer in copy.deepcopy(cache).layers)  # type: ignore[attr-defined]
