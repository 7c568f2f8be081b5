"""The vLLM plugin as far as it needs no vLLM: pages, the parts of a step, heads of ranks, refusals, the proof of an engine."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from still_export.cli.verify_served import check_flags
from still_export.errors import ConfigError, UnsupportedError, UnsupportedModelError
from still_export.mixers.cache import empty_states
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.paged import part_of
from still_export.mixers.layers import FULL
from still_export.mixers.paged import PagedTokens
from still_export.models.build import still_family_config
from still_export.models.description import describe_model
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.load import load_model
from still_export.proof import served
from still_export.proof.served import (
    ANSWER_TOKENS,
    Answer,
    Load,
    Request,
    Served,
    ServedVerifier,
    loads_of,
    other_rounding,
    own_type,
)
from still_export.serving.vllm.config import (
    PAGES_SHARE,
    ServedConfig,
    bound_requests,
    check_device,
    context_length,
    find_quantized,
    keep_experts,
    weight_bytes,
)
from still_export.serving.vllm.engine import in_process
from still_export.serving.vllm.pages import common_pages, linear_state, paged_layers
from still_export.serving.vllm.parts import LEAST_TOKENS, ROOM_TOKENS, ranges_of, rounded_up
from still_export.serving.vllm.prefixes import Prefixes
from still_kernels.codes import rounded
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.paged import GROWING
from tests.gpu.quantized_folders import quantized_folders
from tests.gpu.vllm_checks import PREFIX_LOADS, random_folder
from tests.still_export.linear_models import linear_config
from tests.still_export.tiny import CHUNK, MIXED, still_model

TOKENS = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return still_model("llama", torch.float32, layer_types=MIXED)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_pages_hold_what_a_cache_of_one_row_does(cache: str | None) -> None:
    """In the shapes and types of the model's own states, but for heads of S and salient rows, of which there are as many as pages."""
    model = still_model("qwen2", torch.float32, layer_types=MIXED, cache=cache)
    pages = paged_layers(model.config)[0].pages(TOKENS, 256, torch.bfloat16)
    wanted = {
        name: (tuple(x.shape[1:]), x.dtype)
        for name, x in empty_states(model.config, 1, torch.bfloat16, TOKENS)[0].items()
    }
    found = {name: (shape, dtype) for name, shape, dtype, _ in pages.states}
    assert found.keys() == wanted.keys()
    for name, (shape, dtype) in wanted.items():
        changing = {"kv_state": 0, **dict.fromkeys(GROWING, 1)}.get(name)
        assert found[name][1] == dtype
        assert [n for i, n in enumerate(found[name][0]) if i != changing] == [
            n for i, n in enumerate(shape) if i != changing
        ]
    assert pages.slots == wanted["salient_key"][0][1] and pages.columns == pages.after(TOKENS)


def test_attention_is_quantized_though_it_has_weights_of_its_own() -> None:
    attention, norm = "model.layers.0.self_attn", "model.norm"
    awq = SimpleNamespace(modules_to_not_convert=[attention, norm])
    find_quantized(awq, {"quant_method": "awq", "modules_to_not_convert": None})
    assert awq.modules_to_not_convert == [norm]
    awq = SimpleNamespace(modules_to_not_convert=[attention])
    find_quantized(awq, {"quant_method": "awq", "modules_to_not_convert": [attention]})
    assert awq.modules_to_not_convert == [attention]
    find_quantized(None, None)
    find_quantized(SimpleNamespace(), {})


def test_quantized_weights_take_less(model: Any, tmp_path: Path) -> None:
    count = sum(x.numel() for x in model.parameters())
    (tmp_path / "model-1.safetensors").write_bytes(bytes(count // 2))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(7))

    def taken(quantization: str | None, said: dict[str, Any] | None, place: str = str(tmp_path)) -> int:
        config = copy(model.config)
        config.quantization_config = said
        given = {"hf_config": config, "dtype": torch.bfloat16, "model": place, "quantization": quantization}
        return weight_bytes(SimpleNamespace(**given))

    assert taken(None, None) == 2 * count
    assert taken("awq", {"quant_method": "awq"}) == count // 2 + 7
    assert taken("awq", {"quant_method": "awq"}, "a/hub-id") == taken("fp8", None) == count


def test_requests_are_bounded_by_the_pages_that_fit(model: Any, platform: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    weights = sum(x.numel() for x in model.parameters()) * 2
    pages = common_pages(model.config, TOKENS, torch.bfloat16)
    held = 2 * pages.size_bytes * pages.after(1)
    assert pages.after(1) < pages.after(TOKENS)

    def bounded(requests: float, asked: int = 8) -> int:
        given = vllm_config(model, scheduler_config=SimpleNamespace(max_num_seqs=asked))
        given.cache_config.gpu_memory_utilization = 0.5
        bound_requests(given, int(2 * (weights + requests * held / PAGES_SHARE)) + 2)
        return int(given.scheduler_config.max_num_seqs)

    assert bounded(3) == 3 and "at most 3 requests at the same time, not 8" in caplog.text
    assert bounded(30) == 8
    with pytest.raises(ConfigError, match="from its first token on, which do not fit into the GPU"):
        bounded(0.5)


def test_softmax_layers_are_the_engines_own(model: Any) -> None:
    assert [layer is None for layer in paged_layers(model.config)] == [kind == FULL for kind in MIXED]
    assert common_pages(model.config, TOKENS, torch.float32) == paged_layers(model.config)[2].pages(
        TOKENS, 256, torch.float32
    )


def test_layers_that_differ_in_window_factors_have_the_same_pages() -> None:
    """Else vLLM would see kinds of layers where there is one."""
    factors = [[0.5, 1.0, 2.0, 4.0, 0.1, 3.0], [1.0] * 6, [2.0] * 6]
    config = still_model("llama", torch.float32, window_factors=factors).config
    layers = paged_layers(config)
    assert layers[0].config != layers[1].config
    assert layers[0].pages(TOKENS, 256, torch.float32) == layers[1].pages(TOKENS, 256, torch.float32)


def test_what_is_no_still_model_is_refused() -> None:
    softmax = still_model("llama", torch.float32, layer_types=(FULL,) * 3)
    with pytest.raises(UnsupportedModelError, match="no layer of this STILL model is linearized"):
        paged_layers(softmax.config)
    with pytest.raises(UnsupportedModelError, match="vLLM has the family itself"):
        paged_layers(still_family_config(LINEAR_FAMILIES["lfm2"], linear_config("lfm2").to_dict(), StillConfig()))


def test_keys_and_values_in_8_bits_are_for_hybrid_attention() -> None:
    """What enters is what its codes say."""
    config = still_model("qwen2", torch.float32, layer_types=MIXED, cache="int8").config
    layer = paged_layers(config)[0]
    assert layer is not None
    query, key, value, gate = (torch.randn(5, n, layer.config.head_dim) for n in (6, 2, 2, 6))
    made = layer.inputs(PagedTokens((query, key, value), {"g_proj": gate}, {}, lambda query, key: (query, key + 1)))
    assert torch.equal(made["key"], rounded(key + 1)) and torch.equal(made["value"], rounded(value))
    assert torch.equal(made["query"], query) and not torch.equal(made["value"], value)
    other = still_model("qwen2", torch.float32, layer_types=(FULL, "linearized_gdn", "linearized_gdn"), cache="int8")
    with pytest.raises(UnsupportedModelError, match=r"cache='int8' in config\.json is for layers of STILL's hybrid"):
        paged_layers(other.config)


def test_the_linear_state_is_kept_as_vllm_is_told(model: Any) -> None:
    def told(**given: str) -> torch.dtype:
        return linear_state(SimpleNamespace(**given))

    assert told() == told(mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto") == torch.float32
    assert told(mamba_cache_dtype="bfloat16", mamba_ssm_cache_dtype="auto") == torch.bfloat16
    assert told(mamba_cache_dtype="bfloat16", mamba_ssm_cache_dtype="float32") == torch.float32
    with pytest.raises(ConfigError, match=r"--mamba-ssm-cache-dtype float16: .* in float32 or bfloat16"):
        told(mamba_ssm_cache_dtype="float16")
    pages = common_pages(model.config, TOKENS, torch.bfloat16, linear=torch.bfloat16)
    assert pages.rest and not common_pages(model.config, TOKENS, torch.bfloat16).rest
    other = still_model("qwen2", torch.float32, layer_types=(FULL, "linearized_gdn", "linearized_gdn"))
    with pytest.raises(UnsupportedModelError, match="--mamba-ssm-cache-dtype bfloat16 is for layers of STILL"):
        common_pages(other.config, TOKENS, torch.bfloat16, linear=torch.bfloat16)


LAYER = HybridAttentionConfig(8, 4, 16, window_factor=tuple(range(8)), chunk_size=8)


def test_ranks_share_heads() -> None:
    parts = [part_of(LAYER, 2, rank) for rank in range(2)]
    assert [(p.num_heads, p.num_kv_heads, p.window_factor) for p in parts] == [
        (4, 2, (0.0, 1.0, 2.0, 3.0)),
        (4, 2, (4.0, 5.0, 6.0, 7.0)),
    ]
    assert part_of(LAYER, 8, 3).num_kv_heads == 1  # two ranks have the same
    with pytest.raises(UnsupportedModelError, match="3 ranks cannot share num_attention_heads=8"):
        part_of(LAYER, 3, 0)
    with pytest.raises(UnsupportedModelError, match="at most 4"):
        part_of(replace(LAYER, select_scope="kv_group_max"), 8, 0)


@pytest.mark.parametrize(
    "counts", [[], [5], [ROOM_TOKENS * 3], [2, ROOM_TOKENS, 3, 3], [900] * 30, [1, 2, 3] * 50 + [4000, 7]]
)
def test_parts_hold_every_row_once_and_little_padding(counts: list[int]) -> None:
    ranges = list(ranges_of(counts))
    assert [i for first, last in ranges for i in range(first, last)] == list(range(len(counts)))
    for first, last in ranges:
        assert last - first == 1 or (last - first) * max(counts[first:last]) <= ROOM_TOKENS


def test_longest_of_a_part_takes_few_values() -> None:
    assert [rounded_up(n) for n in (1, LEAST_TOKENS, LEAST_TOKENS + 1, 1000, 1024)] == [16, 16, 32, 1024, 1024]


def test_the_context_ends_at_the_capacity(model: Any) -> None:
    config = model.config
    capacity = config.still.deployment.capacity(config)
    assert context_length(config, capacity + 1, requested=False) == capacity
    assert context_length(config, capacity - 1, requested=True) == capacity - 1
    with pytest.raises(ConfigError, match=f"--max-model-len {capacity + 1} exceeds capacity_tokens={capacity}"):
        context_length(config, capacity + 1, requested=True)
    folding = still_model("llama", torch.float32, overflow="fold_oldest").config
    assert context_length(folding, 10 * capacity, requested=True) == 10 * capacity


def test_layers_are_named_as_vllm_counts_them(model: Any) -> None:
    config = SimpleNamespace(hf_config=model.config, original_max_model_len=None, max_model_len=1 << 20)
    ServedConfig.verify_and_update_model_config(config)
    assert model.config.layers_block_type == ["mamba", "attention", "mamba"]
    assert config.max_model_len == model.config.still.deployment.capacity(model.config)


def test_experts_are_served_where_vllm_has_them() -> None:
    model = still_model("qwen3_moe", torch.float32, layer_types=MIXED)
    config = SimpleNamespace(hf_config=model.config, original_max_model_len=None, max_model_len=1 << 20)
    ServedConfig.verify_and_update_model_config(config)
    assert model.config.layers_block_type == ["mamba", "attention", "mamba"]
    given = SimpleNamespace(hf_config=model.config, dtype=torch.bfloat16, model="", quantization=None)
    experts = sum(x.numel() for name, x in model.named_parameters() if ".experts." in name)
    assert experts == 3 * 6 * 3 * 14 * 24  # layers, experts, matrices and their size
    assert weight_bytes(given) == 2 * sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_other_experts_are_refused_by_name(count: str) -> None:
    config = SimpleNamespace(hf_config=SimpleNamespace(**{"model_type": "still_mixtral", count: 8}))
    with pytest.raises(UnsupportedModelError, match=r"^model_type=mixtral: of models with experts .* serves qwen3_moe"):
        ServedConfig.verify_and_update_model_config(config)


def test_stacks_of_experts_are_not_taken_for_quantized() -> None:
    quantization = SimpleNamespace(get_quant_method=lambda layer, prefix: f"{layer} {prefix}")
    keep_experts(quantization)
    for name in ("experts", "experts.routed_experts"):
        assert quantization.get_quant_method("layer", f"model.layers.0.mlp.{name}") is None
    for name in ("self_attn.qkv_proj", "mlp.gate", "mlp.gate_up_proj"):
        assert quantization.get_quant_method("layer", f"model.layers.0.{name}") == f"layer model.layers.0.{name}"


def vllm_config(model: Any, **changes: Any) -> Any:
    """As much of vLLM's as the hook reads."""
    given = {
        "speculative_config": None,
        "cache_config": SimpleNamespace(enable_prefix_caching=False, mamba_block_size=None),
        "model_config": SimpleNamespace(
            hf_config=model.config, dtype=torch.bfloat16, max_model_len=TOKENS, model="", quantization=None
        ),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's module of platforms: a CPU."""
    cpu = SimpleNamespace(device_type="cpu", is_cuda=lambda: False)
    loggers = SimpleNamespace(init_logger=__import__("logging").getLogger)
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(__import__("sys").modules, "vllm.platforms", SimpleNamespace(current_platform=cpu))
    monkeypatch.setitem(__import__("sys").modules, "vllm.logger", loggers)
    return cpu


def test_speculative_decoding_is_refused(model: Any, platform: Any) -> None:
    with pytest.raises(ConfigError, match="speculative decoding needs states that can drop"):
        ServedConfig.verify_and_update_config(vllm_config(model, speculative_config=object()))


def test_prefix_caching_is_switched_off_with_one_sentence(model: Any, platform: Any, caplog: Any) -> None:
    given = vllm_config(model)
    given.cache_config.enable_prefix_caching = True
    ServedConfig.verify_and_update_config(given)
    assert not given.cache_config.enable_prefix_caching and given.cache_config.mamba_block_size == TOKENS
    assert [r.message for r in caplog.records if "prefix caching is switched off" in r.message]


def test_devices_without_kernels_are_refused(model: Any) -> None:
    check_device(model.config, torch.float32, "cpu", None, 1)
    with pytest.raises(UnsupportedError, match="sm_75 has no kernels"):
        check_device(model.config, torch.float16, "cuda", 75, 1)
    with pytest.raises(UnsupportedError, match="xpu has no kernels"):
        check_device(model.config, torch.float16, "xpu", None, 1)
    with pytest.raises(UnsupportedModelError, match="head_dim=10; the kernels have one of"):
        check_device(model.config, torch.float16, "cuda", 90, 1)


class TorchEngine:
    """An engine that answers as PyTorch does, with one answer changed."""

    def __init__(self, verifier_model: Any, change: str = "") -> None:
        self.model, self.change = verifier_model, change

    def serve(self, load: Load, requests: Any) -> Served:
        return Served([self.answer(r, i == 3) for i, r in enumerate(requests)], 5)

    @torch.no_grad()
    def answer(self, request: Request, chosen: bool) -> Answer:
        tokens, logprobs = list(request.prompt), []
        for _ in range(request.count):
            scores = self.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            token = int(scores.argmax())
            if chosen and self.change == "token":
                token = int(scores.argmin())
            tokens.append(token)
            logprobs.append(float(scores[token]) + (0.2 if chosen and self.change == "logprob" else 0.0))
        count = request.count - (chosen and self.change == "count")
        return Answer(tuple(tokens[len(request.prompt) :][:count]), tuple(logprobs[:count]))


LOAD = Load("one", 64, 4, TOKENS)


@pytest.mark.parametrize("change", ["", "token", "logprob", "count"])
def test_answers_are_held_to_pytorch(model: Any, change: str) -> None:
    verifier = ServedVerifier(describe_model(model), model, None, TorchEngine(model, change))
    (report,) = verifier.run([LOAD], 8, 6)
    assert (report.requests, report.preemptions) == (8, 5) and report.tokens
    assert report.passed == (not change)
    if change:
        assert len(report.wrong) == 1
        assert all(line.startswith("request 3 (") for line in report.wrong)


def test_half_precision_is_held_to_pytorchs_own(model: Any) -> None:
    half = still_model("llama", torch.float32, layer_types=MIXED).to(torch.bfloat16)
    for change in ("", "logprob"):
        verifier = ServedVerifier(describe_model(model), model, half, TorchEngine(half, change))
        (report,) = verifier.run([LOAD], 8, 6)
        assert report.passed == (not change) and 0 < report.bound < 0.2 and not report.open_tokens


@pytest.mark.parametrize("change", ["", "logprob"])
def test_a_choice_that_rounding_turns_is_right(model: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded another way PyTorch keeps another token exact in one of these requests, and is three times further off than allowed."""
    half = still_model("llama", torch.float32, layer_types=MIXED).to(torch.bfloat16)
    kept = [weight.clone() for weight in half.parameters()]

    class Rounded(TorchEngine):
        def serve(self, load: Load, requests: Any) -> Served:
            with other_rounding(half, 1000):
                return super().serve(load, requests)

    (report,) = ServedVerifier(describe_model(model), model, half, Rounded(half, change), 23).run([LOAD], 8, 12)
    assert report.turned == 1 and report.passed == (not change) and len(report.wrong) == bool(change)
    assert all(torch.equal(a, b) for a, b in zip(kept, half.parameters(), strict=True)), "weights stayed moved"
    monkeypatch.setattr(served, "ROUNDINGS", 0)
    (report,) = ServedVerifier(describe_model(model), model, half, Rounded(half), 23).run([LOAD], 8, 12)
    (wrong,) = report.wrong
    assert wrong.startswith("request 5 (") and not report.turned


TURNED = {"float16": (0, 0, {10: 0.57}), "bfloat16": (2, 6, {3: 0.15, 15: 0.24, 20: 0.44, 21: 0.16, 27: 1.58})}
"""Of what vLLM answered on a GPU, by type: load, request, and how far behind PyTorch's likeliest its tokens lay."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TURNED)
def test_other_roundings_choose_what_vllm_answered(dtype: str) -> None:
    load, number, behind = TURNED[dtype]
    folder = random_folder("llama")
    exact, half = (load_model(folder, dtype=kind) for kind in ("float32", dtype))
    verifier = ServedVerifier(describe_model(exact), exact, half, TorchEngine(exact))
    asked = [verifier.requests(each, 12, ANSWER_TOKENS) for each in PREFIX_LOADS][load][number]
    tokens: list[int] = []
    for place in range(max(behind) + 1):
        scores = verifier.reference.logprobs(asked.prompt, [*tokens, 0])[-1]
        tokens.append(int(np.abs(scores.max() - scores - behind.get(place, 0.0)).argmin()))
    found = 0
    for seed in range(served.ROUNDINGS):
        with other_rounding(half, seed):
            found += int(verifier.half.logprobs(asked.prompt, tokens)[-1].argmax()) == tokens[-1]
    assert 3 <= found < served.ROUNDINGS / 2  # 7 and 5 when this was written
    assert verifier.half.logprobs(asked.prompt, tokens)[-1].argmax() != tokens[-1]


def test_what_codes_turn_is_held_to_half_precision(model: Any) -> None:
    """In float32 too, where a last bit may decide between two codes."""
    codes = still_model("qwen2", torch.float32, layer_types=MIXED, cache="int8")
    assert [own_type(x, kind) for x in (model, codes) for kind in ("float32", "bfloat16")] == [
        None, "bfloat16", "float16", "bfloat16",
    ]  # fmt: skip


def test_requests_end_around_chunks_and_anywhere_within_the_context(model: Any) -> None:
    verifier = ServedVerifier(describe_model(model), model, None, TorchEngine(model))
    made = verifier.requests(LOAD, 200, 6)
    lengths = [len(r.prompt) for r in made]
    assert max(len(r.prompt) + r.count for r in made) <= TOKENS and min(lengths) == 1
    assert {CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1} <= set(lengths) and len(set(lengths)) > 20
    assert [r.arrives for r in made] == sorted(r.arrives for r in made) and made[-1].arrives > 100
    assert made == ServedVerifier(describe_model(model), model, None, TorchEngine(model)).requests(LOAD, 200, 6)


def test_a_requests_tokens_follow_the_engines_own_way(model: Any) -> None:
    """After a token that PyTorch finds unlikely the following ones are judged as such, not by what PyTorch would have said."""
    verifier = ServedVerifier(describe_model(model), model, None, TorchEngine(model))
    first = verifier.reference.logprobs([1, 2, 3], [5, 7])
    other = verifier.reference.logprobs([1, 2, 3], [6, 7])
    assert np.allclose(first[0], other[0]) and not np.allclose(first[1], other[1])
    assert np.allclose(np.exp(first).sum(-1), 1)


def test_prompts_begin_alike_where_prefixes_are_kept(model: Any) -> None:
    verifier = ServedVerifier(describe_model(model), model, None, TorchEngine(model))
    made = verifier.requests(replace(LOAD, prefix_tokens=8), 40, 6)
    alike = [
        a.prompt[:8] == b.prompt[:8] for a in made for b in made if len(a.prompt) >= 8 < len(b.prompt) and a is not b
    ]
    assert 0.03 < sum(alike) / len(alike) < 0.7
    assert len({r.prompt for r in made if len(r.prompt) > 2}) == sum(len(r.prompt) > 2 for r in made)


def test_a_prefix_is_lost_with_the_first_of_its_blocks() -> None:
    """vLLM takes a block's key away when it gives it to somebody; a new key is no old one."""
    pool, other = Pool(), Pool()
    blocks = [SimpleNamespace(block_hash=Prefixes.new_key()) for _ in range(6)]
    assert len({block.block_hash for block in blocks}) == 6
    prefixes = Prefixes.of(pool)
    prefixes.keep("a", 0, blocks[:3])
    prefixes.keep("b", 0, [blocks[2], *blocks[3:5]])
    prefixes.keep("a", 1, blocks[5:])
    assert Prefixes.of(pool) is prefixes and Prefixes.of(other).find("a", 0) == []
    assert prefixes.find("a", 0) == blocks[:3] and prefixes.find("a", 1) == blocks[5:] and prefixes.find("c", 0) == []
    blocks[3].block_hash = None
    assert prefixes.find("b", 0) == [] and prefixes.find("a", 0) == blocks[:3]
    blocks[2].block_hash = blocks[3].block_hash = Prefixes.new_key()
    assert prefixes.find("a", 0) == prefixes.find("b", 0) == [] and prefixes.find("a", 1) == blocks[5:]
    prefixes.sweep_at = 1
    blocks[5].block_hash = None
    prefixes.keep("d", 0, blocks[:2])
    assert list(prefixes.entries) == [("d", 0)]


class Pool:
    """Of blocks."""


def test_flags_of_one_proof_are_refused_in_the_other() -> None:
    check_flags("vllm", {"--requests": True}, {"--lengths": False})
    check_flags(None, {"--requests": False}, {"--lengths": True})
    with pytest.raises(ConfigError, match="--lengths, --text: not with --runtime vllm"):
        check_flags("vllm", {"--requests": True}, {"--lengths": True, "--text": True, "--calls": False})
    with pytest.raises(ConfigError, match="--requests: not with a package"):
        check_flags(None, {"--requests": True}, {})


def test_loads_read_prompts_in_pieces_and_throw_requests_out() -> None:
    loads = loads_of(1536)
    assert min(load.budget_tokens for load in loads) == 64
    assert any(load.preempt_every and load.tight for load in loads)
    assert StillConfig().chunk_size <= 64


def test_an_engines_process_has_the_environment_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are forked from one process, which began with another environment; what each says is in a file of its own."""
    log = tmp_path / "log"
    for word in ("first", "second"):
        monkeypatch.setenv("STILL_WORD", word)
        assert (
            in_process(log, exec, "import os; os.system('echo child of $STILL_WORD'); print(os.environ['STILL_WORD'])")
            == 0
        )
        assert log.read_text() == f"child of {word}\n{word}\n"
    assert in_process(log, exec, "raise ValueError('no')") == 1
    assert log.read_text().rstrip().endswith("ValueError: no")


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_folders_in_codes_mean_finite_numbers(form: str, tmp_path: Path) -> None:
    """Of several files, and of a group of zeros, which trained models have."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    weight[3, 64:] = 0
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"layer.up_proj.weight": weight}, source / "model-00001-of-00002.safetensors")
    save_file({"norm.weight": torch.ones(8)}, source / "model-00002-of-00002.safetensors")
    folder, meant = quantized_folders(source, form, tmp_path)
    held = load_file(meant / "model.safetensors")
    assert set(held) == {"layer.up_proj.weight", "norm.weight"}
    assert (held["layer.up_proj.weight"] - weight).abs().max() < 0.3 and not held["layer.up_proj.weight"][3, 64:].any()
    assert {file.name for file in folder.glob("*.safetensors*")} == {"model.safetensors"}
