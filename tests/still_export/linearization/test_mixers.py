"""Linearization to Liger-GLA, GLA and Gated DeltaNet: layers against their formulas, stages, layer selection, packages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus
from transformers import AutoModelForCausalLM

from still_export.errors import ConfigError
from still_export.linearization.adapter import trained_tensors
from still_export.linearization.folder import apply
from still_export.linearization.linearize import linearize, make_accelerator
from still_export.linearization.objectives import TransferObjective, make_students
from still_export.linearization.recipe import LINEARIZERS, Recipe, preset, read_recipe
from still_export.linearization.run import Linearization, LinearizationRun
from still_export.linearization.select_layers import select_layers
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.window import windowed_attention
from still_export.mixers.layers import FULL
from still_export.mixers.paged import PagedTokens
from still_export.mixers.projections import rotate
from still_export.mixers.registry import mixer_of
from still_export.mixers.trainable import SOFTMAX, attention_mode
from still_export.models import attach_untrained
from still_export.models.load import load_model
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_kernels.packing import Packing, PagedStates
from tests.still_export import linearized
from tests.still_export.tiny import FAMILIES, plain_model, random_ids
from tests.still_export.training import make_text, small_values
from tests.still_export.verbs import call

NEW = ("liger-gla", "gla", "gdn")
OPS = {"liger-gla": {"HybridAttention", "LinearAttention"}, "gla": {"LinearAttention"}, "gdn": {"LinearAttention"}}


def attached(mixer: str, family: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    return linearized.attached(LINEARIZERS[mixer].layer, family, dtype, 0.5)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float) -> Tensor:
    """The gated rule, or with beta [B, T, H] the gated delta rule, token by token; all [B, T, H, ...], decay [B, T, H, D or 1]."""
    batch, tokens, heads, dim = query.shape
    state, outputs = query.new_zeros(batch, heads, dim, value.shape[-1]), []
    for t in range(tokens):
        state = decay[:, t, :, :, None].exp() * state
        new = value[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhd,bhdv->bhv", key[:, t], state))
        state = state + key[:, t, :, :, None] * new[:, :, None]
        outputs.append(scale * torch.einsum("bhd,bhdv->bhv", query[:, t], state))
    return torch.stack(outputs, 1)


def formula(module: Any, mixer: str, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What a layer gives before its last projection, by the papers' formulas with keys and values repeated, [B, T, H, D]."""
    dim, turns = module.head_dim, (cos[:, :, None], sin[:, :, None])
    query, key, value = (p(hidden).unflatten(-1, (-1, dim)) for p in (module.q_proj, module.k_proj, module.v_proj))
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    if mixer == "liger-gla":
        linear = recurrence(query.softmax(-1), key.softmax(-1), value, logsigmoid(key) / 16, None, 1.0)
        query, key = rotate(query, *turns), rotate(key, *turns)
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * dim**-0.5
        behind = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
        weight = logits.masked_fill((behind < 0) | (behind >= 64), -torch.inf).softmax(-1)
        return 0.5 * torch.einsum("bhqk,bkhd->bqhd", weight, value) + 0.5 * linear
    if mixer == "gla":
        low = hidden @ module.gk_proj[0].weight.T @ module.gk_proj[1].weight.T + module.gk_proj[1].bias
        decay = (logsigmoid(low) / 16).unflatten(-1, (-1, dim))
        output = recurrence(rotate(query, *turns), rotate(key, *turns), value, decay, None, dim**-0.5)
    else:
        query, key = (silu(x) for x in (query, key))
        query, key = (rotate(x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), *turns) for x in (query, key))
        decay = (-module.A_log.exp() * softplus(module.a_proj(hidden) + module.dt_bias))[..., None]
        output = recurrence(query, key, value, decay, module.b_proj(hidden).sigmoid(), dim**-0.5)
    normed = output / (output.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normed * module.output_scale * silu(module.z_proj(hidden)).unflatten(-1, (-1, dim))


def far_from_formula(mixer: str) -> float:
    """The largest error of a layer's output, without a cache, and as training computes it: 150 tokens are three chunks and more than two
    windows."""
    errors = []
    for module, given, output in linearized.seen_by_layers(attached(mixer)):
        with torch.no_grad():
            expected = formula(module, mixer, given["hidden_states"], *given["position_embeddings"])
        errors.append(float((output - expected.flatten(2)).abs().max()))
    return max(errors)


@pytest.mark.parametrize("mixer", NEW)
def test_a_layer_is_its_formula(mixer: str) -> None:
    assert far_from_formula(mixer) <= 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", NEW)
def test_pieces_and_padding_change_nothing(mixer: str, family: str) -> None:
    linearized.demand_pieces(attached(mixer, family), 1e-8)


@pytest.mark.parametrize("mixer", NEW)
def test_softmax_mode_is_the_base_model(mixer: str) -> None:
    plain, model = plain_model("llama"), attached(mixer)
    ids = random_ids(2, 50)
    with torch.no_grad(), attention_mode(make_students(model), SOFTMAX):
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain(ids).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mixer", ["gla", "gdn"])
def test_fresh_memories_and_a_fitted_start(mixer: str) -> None:
    """Fresh decays are 16 to 4,096 tokens long; a fit comes closer to the base's outputs than outputs of 0 would, on other tokens too."""
    model = attach_untrained(plain_model("llama"), StillConfig(layer_types=(LINEARIZERS[mixer].layer,) * 3))
    first = model.model.layers[0].self_attn
    hidden = torch.zeros(1, 1, 24, dtype=torch.float64)
    heads = torch.ones(1, 1, 6, 10, dtype=torch.float64)
    _, _, decay, _ = first.rule_inputs(heads, heads, *first._own_outputs(hidden), lambda *heads: heads)
    lengths = (-1 / decay.detach()).flatten()
    assert lengths.min() == pytest.approx(16, rel=1e-3) and lengths.max() == pytest.approx(4096, rel=1e-3)
    objective = TransferObjective(model, make_students(model))
    ids, others = random_ids(4, 200), random_ids(1, 200, seed=5)
    before = [objective(x, torch.ones_like(x))[0].item() for x in (ids, others)]
    objective.fit(ids)
    after = [objective(x, torch.ones_like(x))[0].item() for x in (ids, others)]
    assert max(after) < 1 and all(new < 0.9 * old for new, old in zip(after, before, strict=True))


def recipe(mixer: str, base: Path, text: Path, **changes: Any) -> Recipe:
    """Of a few steps on the CPU."""
    steps = 0 if mixer == "liger-gla" else 6
    values = small_values(base, text) | dict(transfer_steps=steps, transfer_rate=1e-3, lora_rank=4)
    return read_recipe(preset(mixer), {**values, **changes})


@pytest.fixture(scope="module", params=NEW)
def finished(
    request: pytest.FixtureRequest, base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Linearization]:
    output = tmp_path_factory.mktemp(request.param) / "model"
    mixer = str(request.param)
    types, said = linearized.types_of(LINEARIZERS[mixer].layer), list[str]()
    result = linearize(recipe(mixer, base, text, layer_types=types), output, log=said.append)
    fitted = [line for line in said if "closed form" in line]
    if mixer == "liger-gla":  # has no start of its own
        assert not fitted
    else:
        assert fitted[0].startswith(
            "cost: a start in closed form, then 6 steps of attention transfer and 4 steps of LoRA"
        )
        assert fitted[1:] == ["start in closed form: 2 layers, 12 rows of 64 tokens"]
    return mixer, output, result


def test_stages_train_what_they_say(finished: tuple[str, Path, Linearization], base: Path, tmp_path: Path) -> None:
    mixer, output, result = finished
    model = load_model(output)
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds[0] == kinds[2] != kinds[1] == "SoftmaxAttention"
    assert [stage.name for stage in result.stages] == (
        ["finetune"] if mixer == "liger-gla" else ["transfer", "finetune"]
    )
    if mixer != "liger-gla":
        held_out = [loss for _, loss in result.stages[0].validation]
        assert held_out[-1] < held_out[0] < 1  # its first batch is what the start was fitted to
        first, second = (load_file(output / "training" / f"{s}.safetensors") for s in ("transfer", "finetune"))
        assert set(first) == set(second)
        assert all(not torch.equal(tensor, second[name]) for name, tensor in first.items())
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    own = {n for n in adapter if "lora_" not in n}
    fresh = {f"model.layers.{i}.self_attn.{n}" for i in (0, 2) for n in model.model.layers[i].self_attn.fresh_names()}
    assert own == fresh
    assert {n.split(".layers.")[1][0] for n in adapter} == {"0", "2"}
    again = apply(str(base), output / "adapter", tmp_path / "again")
    ids = torch.randint(0, 256, (1, 100))
    with torch.no_grad():
        for other in (model, load_model(base, overlays=[output / "adapter"])):
            torch.testing.assert_close(again(ids).logits, other(ids).logits, rtol=0, atol=0)
    report = json.loads((output / "linearize.json").read_text())
    assert report["recipe"]["mixer"] == mixer and set(result.bits_per_byte) >= {"teacher", "after LoRA"}


def test_the_second_stage_starts_where_the_first_ended(
    finished: tuple[str, Path, Linearization], base: Path, text: Path, tmp_path: Path
) -> None:
    """With all that was trained, LoRA among it; and its teacher is the base, whatever LoRA has learned."""
    mixer, output, _ = finished
    if mixer == "liger-gla":
        return
    wanted = recipe(mixer, base, text, layer_types=linearized.types_of(LINEARIZERS[mixer].layer))
    run = LinearizationRun(wanted, tmp_path / "run", make_accelerator(wanted), lambda *_: None, lambda _: None)
    maps = output / "training" / "transfer.safetensors"
    model, students = run.student(maps)
    found, stored = trained_tensors(TransferObjective(model, students)), load_file(maps)
    assert set(found) == set(stored) and any("lora_" in name for name in stored)
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    ids = torch.randint(0, 256, (1, 100))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        with attention_mode(students, SOFTMAX):
            teacher = model(ids, use_cache=False).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    torch.testing.assert_close(teacher, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_folder_becomes_a_proven_package(
    finished: tuple[str, Path, Linearization], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """export, verify, run and evaluate take it as they take a STILL folder; softmax layers are still::Attention."""
    mixer, output, _ = finished
    package = tmp_path / "package"
    linearized.demand_proven(output, package, OPS[mixer], capsys)
    prompt = torch.randint(3, 250, (1, 90), generator=torch.Generator().manual_seed(2))
    model = OrtModel(package, threads=1)
    model.start()
    answer = list(model.generate(prompt[0].tolist(), 8, Sampling()))
    expected = load_model(output).generate(prompt, max_new_tokens=8, do_sample=False)[0, 90:]
    assert answer == expected.tolist()
    flags = ("--lengths", "400", "--depths", "2", "--samples", "1", "--tasks", "needle", "--device", "cpu")
    words = make_text(tmp_path / "words.txt", words=400)
    found = call(
        "evaluate", output, "--variants", "still", "--text", words, "--contexts", "64", *flags, "-o", tmp_path / "e"
    )
    assert found == 0


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["liger-gla", "gdn"])
def test_layers_are_selected(mixer: str, base: Path, text: Path, tmp_path: Path) -> None:
    wanted = recipe(mixer, base, text, sequence_length=192)
    choice = select_layers(wanted, 1, tmp_path / "layers")
    assert sorted(choice.layer_types) == sorted([FULL, *[LINEARIZERS[mixer].layer] * 2]) and len(choice.needs.text) == 3


def test_a_run_goes_on_from_an_adapter(base: Path, text: Path, tmp_path: Path) -> None:
    first = recipe("gdn", base, text)
    linearize(first, tmp_path / "first")
    again = replace(
        first, start=str(tmp_path / "first" / "adapter"), transfer_steps=0, finetune_steps=1, finetune_rate=0.0
    )
    linearize(again, tmp_path / "again")
    ids = torch.randint(0, 256, (1, 80))
    with torch.no_grad():
        old, new = (load_model(tmp_path / name)(ids).logits for name in ("first", "again"))
    torch.testing.assert_close(new, old, rtol=0, atol=2e-2)  # the adapter is float16
    with pytest.raises(ConfigError, match="linearized_gdn"):
        linearize(replace(recipe("gla", base, text), start=again.start), tmp_path / "other")


def test_blocks_are_chosen_without_training(base: Path, text: Path, tmp_path: Path) -> None:
    """The base's own weights, another configuration, no adapter."""
    made = recipe(
        "blocks", base, text, transfer_steps=0, finetune_steps=0, top_blocks=4, local_blocks=1, dense_length=128
    )
    assert made.still_config(2, 4).block_choice()["mean_length"] == 32
    assert replace(made, block_size=1).still_config(2, 4).block_choice()["lse_length"] == 1
    bits = linearize(made, tmp_path / "made").bits_per_byte
    assert bits["teacher"] == bits["after attention transfer"]  # rows are shorter than what is read whole
    assert not (tmp_path / "made" / "adapter").exists()
    config = json.loads((tmp_path / "made" / "config.json").read_text())["still_config"]
    assert set(config["layer_types"]) == {"selected_blocks"} and config["top_blocks"] == 4
    model, theirs = load_model(tmp_path / "made"), load_file(base / "model.safetensors")
    assert all(torch.equal(x, theirs[n]) for n, x in model.state_dict().items() if n in theirs)


def test_what_does_not_hold_is_refused(base: Path, text: Path) -> None:
    for changes, message in (
        ({"window_factors": (10,)}, "--window-factors: options of STILL"),
        ({"salient_per_chunk": 8, "low_rank_gates": True}, "--salient-per-chunk, --low-rank-gates"),
        ({"layer_types": ("hybrid_attention", FULL)}, "names hybrid_attention"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe("gdn", base, text, **changes)
    with pytest.raises(ConfigError, match="--mixer mamba is unknown"):
        Recipe(mixer="mamba")
    with pytest.raises(ConfigError, match="--top-blocks: options of blocks; layers of --mixer gdn"):
        recipe("gdn", base, text, top_blocks=50)
    with pytest.raises(ConfigError, match="--chunk-size: options of STILL; layers of --mixer blocks"):
        Recipe(mixer="blocks", chunk_size=8, transfer_steps=0)
    with pytest.raises(ConfigError, match="no stage 1"):
        recipe("liger-gla", base, text, transfer_steps=3)


@pytest.mark.parametrize("mixer", NEW)
def test_layers_of_an_engine_equal_the_modules(mixer: str) -> None:
    """Two rows in pieces, one rank of two after the other, states in pages that hold garbage at first; the window as a whole."""
    model = attached(mixer, dtype=torch.float32)
    module, rows, dim = model.model.layers[0].self_attn, 2, 10
    hidden = torch.randn(rows, 90, 24, generator=torch.Generator().manual_seed(2))
    cos, sin = model.model.rotary_emb(hidden, torch.arange(90)[None])
    seen: list[Tensor] = []
    module.o_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    with torch.no_grad():
        module(hidden, (cos, sin))
        for rank in range(2):
            layer = mixer_of(model.config, 0).paged(model.config, 0, 2, rank)
            mine = slice(3 * rank, 3 * rank + 3)
            heads = [
                x[:, :, part]
                for x, part in zip(module.heads(hidden), (mine, *[slice(rank, rank + 1)] * 2), strict=True)
            ]
            projected = {
                name: module.get_submodule(name)(hidden).unflatten(-1, (6, -1))[:, :, mine].flatten(2)
                for name in layer.projections
            }
            weights = {name: module.get_parameter(name)[mine] for name in layer.head_weights}
            assert all(module.get_parameter(name).shape == shape for name, shape in layer.head_weights.items())
            window = (
                windowed_attention(*module.turned(*heads[:2], (cos, sin)), heads[2], layer.window)
                if layer.window
                else None
            )
            pages = layer.pages(90, 256, torch.float32)
            memory = torch.full((3, pages.size_bytes // 4), torch.nan).view(torch.int8)
            for first, last in ((0, 40), (40, 41), (41, 90)):
                cut = slice(first, last)

                def packed(x: Tensor, cut: slice = cut) -> Tensor:
                    return x[:, cut].flatten(0, 1)

                turns = [packed(x.expand(rows, -1, -1))[:, None] for x in (cos, sin)]
                call = PagedTokens(
                    tuple(packed(x) for x in heads),  # type: ignore[arg-type]  # three of them
                    {name: packed(x) for name, x in projected.items()},
                    weights,
                    lambda q, k, at=turns: (rotate(q, *at), rotate(k, *at)),  # type: ignore[misc]
                )
                inputs = layer.inputs(call)
                assert tuple(inputs) == layer.names
                output, count = torch.zeros(rows * (last - first), 3, dim), last - first
                start, table = torch.arange(rows + 1) * count, torch.tensor([[2], [1]], dtype=torch.int32)
                packing = Packing(start, table, count, pages)
                layer.attend(inputs, weights, PagedStates(memory, torch.full((rows,), first), packing), output)
                found = layer.result(output, None if window is None else packed(window), call)
                wanted = packed(seen[0].unflatten(-1, (6, dim))[:, :, mine])
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
