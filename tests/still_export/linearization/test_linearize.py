"""Linearization: what the stages change, what resuming and several processes must not change, what users may get wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from still_export.errors import CheckpointError, ConfigError, DataError, TrainingError, UnsupportedModelError
from still_export.linearization.adapter import Start, attach_lora, read_adapter, save_adapter, still_parameters
from still_export.linearization.folder import apply
from still_export.linearization.linearize import linearize
from still_export.linearization.objectives import FinetuneObjective, TransferObjective
from still_export.linearization.recipe import Recipe, read_recipe
from still_export.linearization.run import Linearization, LinearizationRun, cross_entropy, demand_kernels
from still_export.linearization.trainer import StopTraining, plateau, schedule
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.modes import far_attention, make_trainable, selection_loss
from still_export.mixers.layers import Deployment
from still_export.mixers.trainable import SOFTMAX, STUDENT, attention_mode
from still_export.models import attach_untrained
from still_export.models.load import load_model
from still_export.models.read.checkpoint import iterate_tensors
from still_export.texts.files import read_text
from still_export.texts.tasks import TASKS, TaskWriter, Weighing
from still_export.texts.texts import Batches, held_out_rows, read_corpus
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from tests.still_export.tiny import FAMILIES, plain_model, random_ids, still_model
from tests.still_export.training import byte_tokenizer, make_base, small_recipe


@pytest.fixture(scope="module")
def finished(base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Linearization]:
    output = tmp_path_factory.mktemp("finished") / "model"
    return output, linearize(small_recipe(base, text), output)


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_mode_is_the_base_model(family: str) -> None:
    plain = plain_model(family)
    model = attach_untrained(plain, StillConfig(chunk_size=8))
    ids, least = random_ids(2, 50), 1e-6 if family == "qwen3_moe" else 1e-10  # transformers routes in float32
    with torch.no_grad(), attention_mode(make_trainable(model), SOFTMAX):
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain(ids).logits, rtol=0, atol=least)


def test_transfer_compares_with_the_softmax_stream() -> None:
    """Each layer's difference is that of its own hybrid output at the teacher's input, whatever the layers before it do."""
    model = still_model("llama", torch.float64)
    attentions = make_trainable(model)
    ids = random_ids(2, 40)
    seen: dict[int, tuple[Any, ...]] = {}
    for attention in attentions:
        attention.o_proj.register_forward_hook(lambda m, x, y, i=attention.layer_idx: seen.__setitem__(i, x[0]))
    _, layers = TransferObjective(model, attentions)(ids, torch.ones_like(ids))
    teacher = dict(seen)
    for index, attention in enumerate(attentions):
        attention.mode = STUDENT  # layers before it compute softmax: the teacher's stream
        for other in attentions[:index]:
            other.mode = SOFTMAX
        with torch.no_grad():
            model(ids, use_cache=False)
        heads = (attention.still.num_heads, attention.head_dim)
        ours, theirs = (x[index].unflatten(2, heads) for x in (seen, teacher))
        expected = [
            mse_loss(ours[b, :, h], theirs[b, :, h]) / theirs[b, :, h].square().mean()
            for b in range(2)
            for h in range(heads[0])
        ]
        torch.testing.assert_close(layers[index], torch.stack(expected).mean().float(), rtol=1e-4, atol=1e-7)


def test_transfer_descends() -> None:
    model = attach_untrained(plain_model("llama", torch.float32), StillConfig(chunk_size=8, salient_per_chunk=2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = [p.requires_grad_(True) for _, p in still_parameters(model)]
    objective, optimizer = TransferObjective(model, make_trainable(model)), torch.optim.AdamW(trained, lr=1e-2)
    ids = random_ids(4, 96)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss, _ = objective(ids, torch.ones_like(ids))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


def test_transfer_trains_maps_and_gates_and_nothing_else(base: Path, finished: tuple[Path, Linearization]) -> None:
    output, result = finished
    maps = load_file(output / "training" / "transfer.safetensors")
    model = load_model(str(base), attach_untrained=True)
    expected = {name for name, _ in still_parameters(model)}
    assert set(maps) == expected
    before = dict(model.named_parameters())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in maps.items())
    assert [len(stage.losses) for stage in result.stages] == [4, 4]


def test_adapter_on_the_base_is_the_model(base: Path, finished: tuple[Path, Linearization], tmp_path: Path) -> None:
    output, result = finished
    again = apply(str(base), output / "adapter", tmp_path / "again")
    ids = torch.randint(0, 256, (1, 100))
    with torch.no_grad():
        for model in (load_model(output), load_model(base, overlays=[output / "adapter"])):
            torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="configuration of its own"):
        load_model(base, overlays=[output / "adapter"], still_config=StillConfig())
    longer = load_model(base, overlays=[output / "adapter"], deployment={"capacity_tokens": 777}).config.still
    assert longer == replace(load_model(output).config.still, deployment=Deployment(capacity_tokens=777))
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    for name, parameter in still_parameters(again):
        if "feature_" in name or name.endswith("bias"):  # LoRA adds to the weights of gates
            torch.testing.assert_close(parameter.detach(), adapter[name].float(), rtol=0, atol=0)
    names = {n for n in adapter if "lora_" in n}
    for target in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"):
        assert f"model.layers.2.self_attn.{target}.lora_B.default.weight" in names
    bits = result.bits_per_byte
    assert bits["after LoRA"] < bits["after attention transfer"]
    saved = json.loads((output / "linearize.json").read_text())
    assert saved["bits_per_byte"] == bits and saved["recipe"]["chunk_size"] == 8


def quality(folder: Path) -> float:
    """Bits per byte of the held-out rows by the model in `folder`, which a run wrote."""
    recipe = json.loads((folder / "linearize.json").read_text())["recipe"]
    corpus = read_corpus(recipe["texts"], byte_tokenizer(), 257, recipe["held_out"])
    rows = held_out_rows(corpus, recipe["validation_rows"], recipe["sequence_length"])
    model = load_model(folder)
    with torch.no_grad():
        nats = sum(cross_entropy(model(row[None]).logits, row[None]) for row in rows) / len(rows)
    return nats / torch.log(torch.tensor(2.0)).item() / corpus.bytes_per_token


def test_saved_model_has_the_reported_quality(finished: tuple[Path, Linearization]) -> None:
    """float16 in the adapter costs nothing that shows."""
    output, result = finished
    assert quality(output) == pytest.approx(result.bits_per_byte["after LoRA"], rel=1e-3)


def test_learned_factors_and_low_rank_gates(base: Path, text: Path, tmp_path: Path) -> None:
    changes = {"learn_window_factors": True, "low_rank_gates": True, "transfer_rate": 0.1, "window_factors": (2.0,)}
    result = linearize(small_recipe(base, text, **changes), tmp_path / "model")
    assert quality(tmp_path / "model") == pytest.approx(result.bits_per_byte["after LoRA"], rel=1e-3)
    factors = torch.tensor(load_model(tmp_path / "model").config.still_config["window_factors"])
    assert factors.min() > 0 and (factors - 2).abs().min() > 1e-3  # every head of every layer moved
    assert (factors - 2).abs().max() < 20
    adapter = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    assert not [name for name in adapter if name.endswith("g_proj.weight") or "window_factor" in name]
    assert [name for name in adapter if "g_proj.lora_B" in name]


def test_stage_2_trains_maps_where_asked(base: Path, text: Path, tmp_path: Path) -> None:
    """Maps and biases of gates move after stage 1 too, and the adapter holds what they became."""
    changes = {"low_rank_gates": True, "finetune_maps": True, "finetune_rate": 0.01}
    recipe = small_recipe(base, text, **changes, transfer_steps=1, finetune_steps=2)
    result = linearize(recipe, tmp_path / "model")
    assert quality(tmp_path / "model") == pytest.approx(result.bits_per_byte["after LoRA"], rel=1e-3)
    assert "after attention transfer" not in result.bits_per_byte
    before = load_file(tmp_path / "model" / "training" / "transfer.safetensors")
    after = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    own = [name for name in before if "feature_" in name or name.endswith("g_proj.bias")]
    assert len(own) == 3 * 3 and not any(torch.equal(before[name].half(), after[name]) for name in own)


@pytest.mark.parametrize("dtype", ["int8", "int6"])
def test_a_low_bit_adapter(dtype: str, base: Path, finished: tuple[Path, Linearization], tmp_path: Path) -> None:
    """Smaller than the float16 one, of its quality; parts that are not those of the rows are refused."""
    output, result = finished
    recipe = read_recipe(None, {"base": str(base), "adapter_dtype": dtype, "lora_rank": 2})
    values = json.loads((output / "adapter" / "adapter_config.json").read_text())
    recipe = replace(recipe, lora_rank=values["r"], lora_alpha=values["lora_alpha"])
    tensors = dict(iterate_tensors(output / "adapter" / "adapter_model.safetensors"))
    save_adapter(tmp_path / "adapter", tensors, read_adapter(output / "adapter")[1], recipe)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    # Rows of this tiny model are short, and every one has a scale.
    assert path.stat().st_size < 0.8 * (output / "adapter" / "adapter_model.safetensors").stat().st_size
    model = apply(str(base), tmp_path / "adapter", tmp_path / "model")
    shutil.copy(output / "linearize.json", tmp_path / "model")
    assert quality(tmp_path / "model") == pytest.approx(result.bits_per_byte["after LoRA"], rel=3e-3)
    for name, parameter in still_parameters(model):
        if "feature_" in name:
            exact = tensors[name].float()
            if dtype == "int6":
                exact = exact - torch.diag_embed(exact.diagonal(dim1=-2, dim2=-1))
            step = exact.abs().amax(-1, keepdim=True) / {"int8": 127, "int6": 31}[dtype]
            assert ((parameter.detach() - tensors[name].float()).abs() <= 0.51 * step).all()
    stored = load_file(path)
    maps = [name for name in tensors if "feature_" in name]
    widths = {stored[name].shape[-1] for name in maps}  # rows of 10
    assert maps and widths == {{"int8": 10, "int6": 9}[dtype]}
    for end in {".scale", ".diagonal"} & {Path(name).suffix for name in stored}:
        name = next(n for n in stored if n.endswith(end))
        save_file({**stored, name: stored[name][..., :1].contiguous()}, path)
        with pytest.raises(CheckpointError, match="low-bit rows"):
            apply(str(base), tmp_path / "adapter", tmp_path / "again")


@pytest.mark.slow
def test_adapter_is_a_start(base: Path, text: Path, tmp_path: Path) -> None:
    """A run that goes on from an adapter begins with its quality, keeps its factors and learns them in stage 2 too."""
    common = {"learn_window_factors": True, "low_rank_gates": True, "batch_size": 2}
    first = linearize(small_recipe(base, text, **common, window_factors=(2.0,), transfer_rate=0.1), tmp_path / "first")
    recipe = small_recipe(base, text, **common, start=str(tmp_path / "first" / "adapter"), transfer_steps=0)
    still = replace(recipe, transfer_rate=1e-12, finetune_rate=1e-12, finetune_steps=1)
    scaled = linearize(replace(still, finetune_steps=0, window_factor_scale=3.0), tmp_path / "scaled")
    assert scaled.bits_per_byte["after LoRA"] != pytest.approx(first.bits_per_byte["after LoRA"], rel=1e-4)
    same = linearize(still, tmp_path / "same")
    assert same.bits_per_byte["after LoRA"] == pytest.approx(first.bits_per_byte["after LoRA"], rel=1e-3)
    assert same.bits_per_byte["after attention transfer"] == pytest.approx(
        first.bits_per_byte["after attention transfer"], rel=1e-3
    )
    linearize(recipe, tmp_path / "second")
    folders = ("first", "same", "scaled", "second")
    before, kept, tripled, moved = (
        torch.tensor(load_model(tmp_path / name).config.still_config["window_factors"]) for name in folders
    )
    torch.testing.assert_close(kept, before, rtol=1e-5, atol=0)
    torch.testing.assert_close(tripled, 3 * before, rtol=1e-5, atol=0)
    assert (moved / before - 1).abs().min() > 1e-4
    for change in ({"lora_rank": 4}, {"feature_map": "softmax"}):
        with pytest.raises(ConfigError, match="must be equal"):
            linearize(replace(recipe, **change), tmp_path / "other")
    mixed = replace(recipe, layer_types=("hybrid_attention", "full_attention", "hybrid_attention"), finetune_steps=0)
    result = linearize(mixed, tmp_path / "mixed")
    assert quality(tmp_path / "mixed") == pytest.approx(result.bits_per_byte["after LoRA"], rel=1e-3)
    kept_tensors = load_file(tmp_path / "mixed" / "adapter" / "adapter_model.safetensors")
    start_tensors = load_file(tmp_path / "first" / "adapter" / "adapter_model.safetensors")
    assert kept_tensors.keys() == {name for name in start_tensors if ".layers.1." not in name}
    softmax, plain = (
        load_model(tmp_path / "mixed").model.layers[1],
        load_model(base, attach_untrained=True).model.layers[1],
    )
    assert torch.equal(softmax.self_attn.q_proj.weight, plain.self_attn.q_proj.weight)
    # The softmax layer becomes hybrid: stage 1 trains it alone, from the median of the others' factors on.
    new = replace(recipe, start=str(tmp_path / "mixed" / "adapter"), transfer_steps=2, finetune_steps=0)
    factors = torch.tensor(Start(new).window_factors(new.still_config(3, 2), 3))
    assert torch.equal(factors[[0, 2]], torch.tensor(Start(new).still.window_factors)[[0, 2]])
    untrained = replace(new, transfer_steps=0, finetune_maps=False)  # whose linear terms would do harm
    assert torch.tensor(Start(untrained).window_factors(new.still_config(3, 2), 3))[1].eq(10_000).all()
    torch.testing.assert_close(factors[1], factors[[0, 2]].quantile(0.5).expand_as(factors[1]))
    linearize(new, tmp_path / "new")
    new_tensors = load_file(tmp_path / "new" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(new_tensors[name], tensor) for name, tensor in kept_tensors.items())
    name = "model.layers.1.self_attn.feature_q_weight"
    assert not torch.equal(new_tensors[name], load_model(base, attach_untrained=True).state_dict()[name].half())
    made = torch.tensor(load_model(tmp_path / "new").config.still_config["window_factors"])
    torch.testing.assert_close(made[[0, 2]], factors[[0, 2]], rtol=1e-5, atol=0)
    assert (made[1] / factors[1] - 1).abs().min() > 1e-4
    other = make_base(tmp_path / "base", hidden_size=96)
    with pytest.raises(CheckpointError, match="another base"):
        linearize(replace(recipe, base=str(other)), tmp_path / "other")


@pytest.mark.parametrize("stop", [("transfer", 3), ("finetune", 3)], ids=["stage 1", "stage 2"])
def test_killed_run_resumes_to_the_last_digit(
    stop: tuple[str, int], base: Path, text: Path, finished: tuple[Path, Linearization], tmp_path: Path
) -> None:
    class Killed(Exception):
        pass

    def kill(stage: str, step: int, total: int, measured: dict[str, float]) -> None:
        if (stage, step) == stop:
            raise Killed

    recipe, output = small_recipe(base, text), tmp_path / "model"
    with pytest.raises(Killed):
        linearize(recipe, output, progress=kill)
    steps: list[tuple[str, int]] = []
    result = linearize(recipe, output, resume=True, progress=lambda stage, step, *_: steps.append((stage, step)))
    assert steps[0] == (stop[0], 3)  # the checkpoint after step 2 was found
    for ours, theirs in zip(result.stages, finished[1].stages, strict=True):
        assert ours.losses == theirs.losses and ours.validation == theirs.validation
    assert result.bits_per_byte == finished[1].bits_per_byte


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("fsdp", "short rows"))]
)
def test_two_processes_have_the_losses_of_one(
    kind: str, base: Path, text: Path, finished: tuple[Path, Linearization], tmp_path: Path
) -> None:
    fsdp, recipe, alone = kind == "fsdp", tmp_path / "recipe.yaml", finished[1]
    values = small_recipe(base, text, device="cpu" if fsdp else "auto")
    if kind == "short rows":  # of at most two chunks, in which nothing is far
        values = replace(values, transfer_steps=0, row_lengths=(16, 64))
        alone = linearize(replace(values, device="cpu"), tmp_path / "alone")
    recipe.write_text(yaml.safe_dump(values.to_dict()), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if fsdp:
        environment |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        }
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *([str(Path(__file__).parents[1] / "fsdp_on_cpu.py")] if fsdp else ["-m", "still_export.cli.main"]),
    ]
    done = subprocess.run(
        [*launch, "linearize", "--config", str(recipe), "-o", str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("bits per byte of held-out text, teacher") == 1  # the first process speaks for all
    assert done.stderr.count("sharded: True") == done.stderr.count("compiled: True") == 2 * fsdp
    assert done.stderr.count("stage 2, LoRA") == 1 and "destroy_process_group" not in done.stderr
    report = json.loads((tmp_path / "model" / "linearize.json").read_text())
    for ours, theirs in zip(report["stages"], alone.stages, strict=True):
        assert ours["losses"] == pytest.approx(theirs.losses, rel=1e-5)
    shards = list((tmp_path / "model" / "training" / "finetune").glob("step-*/*.distcp"))
    assert len(shards) == 4  # two checkpoints, a shard of each process


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_micro_batches_and_recomputation_change_nothing(loss: str, base: Path, text: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        base,
        text,
        transfer_steps=2,
        finetune_steps=2,
        sequence_length=200,
        loss=loss,
        retrieval=0.5,
        selection_weight=0.1,
        selection_target="base" if loss == "kl" else "student",
    )
    whole = linearize(recipe, tmp_path / "whole")
    cut = linearize(replace(recipe, micro_batch_size=1, gradient_checkpointing=True), tmp_path / "cut")
    for ours, theirs in zip(cut.stages, whole.stages, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


def test_passes_of_short_rows_have_the_tokens_of_long_ones(base: Path, text: Path) -> None:
    recipe = small_recipe(base, text, sequence_length=96, row_lengths=(32, 96, 192), batch_size=4)
    assert [recipe.rows_of_a_pass(length) for length in (32, 96, 192)] == [12, 4, 2]
    cut = replace(recipe, micro_batch_size=1)
    assert [cut.rows_of_a_pass(length) for length in (32, 96, 192)] == [3, 1, 1]


def test_teacher_inside_the_student_is_the_base() -> None:
    """KL compares with the base: no LoRA, softmax. Where the student is the base, it is zero."""
    plain = plain_model("qwen3", torch.float64)
    model = attach_untrained(plain, StillConfig(chunk_size=8, salient_per_chunk=8, mix_epsilon=0.0))
    objective = FinetuneObjective(model, make_trainable(model), "kl")
    ids = random_ids(2, 40)
    with torch.no_grad():
        logits = model.lm_head(objective.teacher_hidden(ids))
        torch.testing.assert_close(logits, plain(ids).logits, rtol=0, atol=1e-10)
        assert float(objective(ids, torch.ones(ids.shape))[0]) < 1e-6


def test_selection_loss_makes_attended_tokens_salient() -> None:
    """Descending it on the keys moves a far, attended token into the top k of its chunk."""
    config = HybridAttentionConfig(1, 1, 4, chunk_size=8, salient_per_chunk=1)
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 32, 1, 4, generator=generator) for _ in range(2))
    wanted = 3
    key[0, wanted] = query[0, 31] * 3  # the last query attends to it
    query.requires_grad_(True)
    start = selection_loss(query, key, torch.tensor([[31]]), config).item()
    optimizer = torch.optim.Adam([query], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        selection_loss(query, key, torch.tensor([[31]]), config).backward()
        optimizer.step()
    from still_export.mixers.hybrid_attention.modes import margins

    scores = margins(query.detach().transpose(1, 2), key.transpose(1, 2), 8)[0, 0, 1:8]
    assert int(scores.argmax()) + 1 == wanted
    assert selection_loss(query, key, torch.tensor([[31]]), config).item() < start


def test_the_selection_can_aim_at_the_base() -> None:
    """The base's attention is the target of every layer whatever LoRA does to the student's, and heads that select together share it."""
    config = StillConfig(chunk_size=8, salient_per_chunk=2, select_scope="kv_group_max")
    model = attach_untrained(plain_model("qwen3", torch.float32), config)
    model = attach_lora(model, Recipe())
    attentions = make_trainable(model)
    ids, weights = random_ids(2, 64), torch.ones(2, 64)
    parts: dict[tuple[str, str, bool], float] = {}
    targets = {}
    for changed in (False, True):
        for name, parameter in model.named_parameters():
            if changed and "lora_B" in name and ("q_proj" in name or "k_proj" in name):
                parameter.data.normal_(generator=torch.Generator().manual_seed(1))
        for loss, aim in (("kl", "base"), ("ce", "base"), ("kl", "student")):
            objective = FinetuneObjective(model, attentions, loss, 1.0, selection_target=aim)
            parts[loss, aim, changed] = float(objective(ids, weights)[1][-1])
            if aim == "base":
                targets[loss, changed] = torch.stack([a.selection_target for a in attentions])
    assert torch.equal(targets["kl", False], targets["ce", True]) and targets["kl", False].any()
    assert parts["kl", "base", True] == pytest.approx(parts["ce", "base", True], rel=1e-6)
    assert parts["kl", "base", True] != pytest.approx(parts["kl", "student", True], rel=1e-4)

    layer = attentions[0].still
    query, key = (
        torch.randn(1, 64, layer.num_heads, layer.head_dim),
        torch.randn(1, 64, layer.num_kv_heads, layer.head_dim),
    )
    positions = torch.tensor([[40, 63]])
    each = far_attention(query, key, positions, layer)
    together = (
        each.unflatten(1, (layer.num_kv_heads, -1))
        .sum(2, keepdim=True)
        .expand(-1, -1, layer.group_size, -1)
        .flatten(1, 2)
    )
    assert each.shape == (1, layer.num_heads, 64) and layer.group_size > 1
    own, shared = (selection_loss(query, key, positions, layer, t) for t in (each, together / layer.group_size))
    assert own.item() == pytest.approx(shared.item(), rel=1e-5) and own.item() > 0
    assert own.item() == pytest.approx(selection_loss(query, key, positions, layer).item())


def test_batches_depend_on_seed_and_step_alone(text: Path) -> None:
    tokenizer = byte_tokenizer()
    corpus = read_corpus([text], tokenizer, 257, 0.1)
    make = lambda seed: Batches(corpus, TaskWriter(tokenizer, corpus.train), 3, 200, seed, 0.5, Weighing(10.0))  # noqa: E731
    one, other = make(1), make(1)
    for step in (0, 7, 100):
        a, b = one.batch(step), other.batch(step)
        assert torch.equal(a.ids, b.ids) and torch.equal(a.weights, b.weights)
        assert a.ids.shape == a.weights.shape == (3, 200)
    assert not torch.equal(one.batch(5).ids, make(2).batch(5).ids)
    assert set(torch.cat([one.batch(s).weights for s in range(9)]).unique().tolist()) == {0.0, 1.0, 10.0}


def test_blocks_of_an_epoch_cover_the_text_once(text: Path) -> None:
    tokenizer = byte_tokenizer()
    corpus = read_corpus([text], tokenizer, 257, 0.5)
    batches = Batches(corpus, TaskWriter(tokenizer, corpus.train), 1, 100, 0, 0.0, Weighing())
    seen = torch.cat([batches.batch(step).ids for step in range(batches.blocks(100))])
    assert sorted(map(tuple, seen.tolist())) == sorted(
        map(tuple, corpus.train[: batches.blocks(100) * 100].reshape(-1, 100).tolist())
    )


@pytest.mark.parametrize("name", TASKS)
def test_prompt_holds_its_answer_at_the_asked_depth(name: str, text: Path) -> None:
    import numpy as np

    tokenizer = byte_tokenizer()
    writer = TaskWriter(tokenizer, read_corpus([text], tokenizer, 257, 0.0).train)
    for depth in (0.0, 0.5, 1.0):
        ids, count = writer.prompt(TASKS[name], 700, depth, np.random.default_rng(4))
        prompt, answer = tokenizer.decode(ids[:-count]), tokenizer.decode(ids[-count:])
        assert len(ids) == 700 and len(answer.strip()) == 6
        assert prompt.count(answer) == 1
        assert prompt.index(answer) / len(prompt) == pytest.approx(0.05 + 0.75 * depth, abs=0.15)


def test_schedule_and_plateau() -> None:
    rates = [schedule(step, 100, 0.1) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert plateau([5.0, 4.0, 4.0, 4.1, 4.0], 3) and not plateau([5.0, 4.0, 4.0, 3.9], 3)
    assert not plateau([5.0, 5.0], 3) and not plateau([5.0] * 9, 0)


def test_layers_that_no_kernel_computes_are_refused_before_texts_are_read() -> None:
    """On CUDA; kernels keep 32 salient tokens of a chunk."""
    demand_kernels(load_model(Path(__file__).parents[3] / "assets" / "small"))
    with pytest.raises(ConfigError, match=r"salient_per_chunk=40; the kernels have at most 32.* use --device cpu"):
        demand_kernels(attach_untrained(plain_model("llama"), StillConfig(salient_per_chunk=40)))


def test_window_factors_reach_model_and_training(base: Path, text: Path, tmp_path: Path) -> None:
    """Each layer takes its factor, and model and adapter carry it."""
    recipe = small_recipe(base, text, transfer_steps=1, finetune_steps=0)
    plain = linearize(recipe, tmp_path / "plain").stages[0].losses[0]
    factored = linearize(replace(recipe, window_factors=(2.0, 3.0, 1e6)), tmp_path / "factored")
    assert factored.stages[0].losses[0] != pytest.approx(plain, rel=1e-3)
    config = load_model(tmp_path / "factored").config.still
    assert config.window_factors == ((2.0,) * 6, (3.0,) * 6, (1e6,) * 6)
    again = apply(str(base), tmp_path / "factored" / "adapter", tmp_path / "again")
    assert again.config.still == config
    with pytest.raises(ConfigError, match="2 values; give one, or one for each of 3 layers"):
        linearize(replace(recipe, window_factors=(2.0, 3.0)), tmp_path / "bad")


def test_layers_have_salient_tokens_of_their_own(base: Path, text: Path, tmp_path: Path) -> None:
    """In training, in the model that is read again, whose selections have so many rows, and not in a number of layers that is none."""
    layers = load_model(base, attach_untrained=True).config.num_hidden_layers
    own = tuple(1 + i % 3 for i in range(layers))
    linearize(replace(small_recipe(base, text), salient_by_layer=own, finetune_steps=1), tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert tuple(attention.still.salient_per_chunk for attention in make_trainable(model)) == own
    cache = model(random_ids(1, 80), use_cache=True).past_key_values
    rows = [state["salient_key"].shape[2] for state in cache.states()]
    assert [row / rows[0] for row in rows] == [k / own[0] for k in own]
    with pytest.raises(ConfigError, match=f"salient_by_layer has 1 entries for num_hidden_layers={layers}"):
        linearize(replace(small_recipe(base, text), salient_by_layer=(2,)), tmp_path / "other")


def test_stage_ends_on_a_plateau(base: Path, text: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        base, text, transfer_rate=0.0, transfer_steps=20, finetune_steps=0, validate_every=1, patience=2
    )
    stage = linearize(recipe, tmp_path / "model").stages[0]
    assert stage.stopped_early and stage.steps == 3


def test_stage_keeps_the_weights_that_validated_best(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a run was stopped after its best step and went on from a checkpoint."""
    seen: list[dict[str, Tensor]] = []

    def validate(run: LinearizationRun, module: nn.Module) -> float:
        seen.append({n: p.detach().clone() for n, p in sorted(module.named_parameters()) if "lora_" in n})
        return (1.0, 0.5, 0.7, 0.8)[len(seen) - 1]

    def stop(stage: str, done: int, of: int, values: dict[str, float]) -> None:
        if done == 3:
            raise StopTraining

    monkeypatch.setattr(LinearizationRun, "validate", validate)
    recipe = small_recipe(base, text, transfer_steps=0, finetune_steps=4, validate_every=1, checkpoint_every=100)
    with pytest.raises(StopTraining):
        linearize(recipe, tmp_path / "model", progress=stop)
    stage = linearize(recipe, tmp_path / "model", resume=True).stages[0]
    assert (stage.steps, stage.kept) == (4, 2)
    trained = load_file(tmp_path / "model" / "training" / "finetune.safetensors")
    kept = [tensor for name, tensor in sorted(trained.items()) if "lora_" in name]
    for tensor, best, last in zip(kept, seen[1].values(), seen[3].values(), strict=True):
        assert torch.equal(tensor, best) and not torch.equal(tensor, last)


def test_bad_texts_and_tokenizers(base: Path, text: Path, tmp_path: Path) -> None:
    empty, binary, zeros = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "zeros.txt"
    empty.write_text("\n ")
    binary.write_bytes(b"text \xff\xfe text")
    zeros.write_bytes(b"text\0text")
    for path, message in (
        (empty, "empty"),
        (binary, "not UTF-8"),
        (zeros, "zero bytes"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            linearize(small_recipe(base, path), tmp_path / "model")
    empty.write_bytes(b"\xef\xbb\xbftext")
    assert read_text(empty) == "text"  # without the byte order mark
    small = make_base(tmp_path / "small", "llama")
    config = json.loads((small / "config.json").read_text())
    with pytest.raises(DataError, match="belongs to another model"):
        read_corpus([text], byte_tokenizer(), config["vocab_size"] - 200, 0.1)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises((DataError, ConfigError), match="fewer than one row"):
        linearize(small_recipe(base, short), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_teacher_with_nan_stops_with_its_layer(text: Path, tmp_path: Path) -> None:
    """Finite weights whose activations overflow; weights that are NaN are refused when they are read."""
    model = plain_model("llama", torch.float32, vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    recipe = small_recipe(tmp_path / "base", text)
    with pytest.raises(TrainingError, match=r"step 0 \(parts 1.*not finite"):
        linearize(recipe, tmp_path / "model")


def test_out_of_memory_names_the_flag(base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TransferObjective, "forward", full)
    with pytest.raises(TrainingError, match="--micro-batch-size"):
        linearize(small_recipe(base, text), tmp_path / "model")


def test_folder_of_another_run_is_left_alone(base: Path, text: Path, finished: tuple[Path, Linearization]) -> None:
    output = finished[0]
    before = {p: p.stat().st_mtime_ns for p in output.rglob("*")}
    with pytest.raises(TrainingError, match="another run: chunk_size 8 there, 16 here"):
        linearize(small_recipe(base, text, chunk_size=16), output, resume=True)
    with pytest.raises(ConfigError, match="--resume"):
        linearize(small_recipe(base, text), output)
    with pytest.raises(TrainingError, match="no run to resume"):
        linearize(small_recipe(base, text), output / "nothing", resume=True)
    assert {p: p.stat().st_mtime_ns for p in output.rglob("*")} == before


def test_force_deletes_linearized_models_only(base: Path, text: Path, finished: Any, tmp_path: Path) -> None:
    adapter = finished[0] / "adapter"
    for call in (
        lambda: linearize(small_recipe(base, text), base, force=True),
        lambda: apply(str(base), adapter, base, force=True),
    ):
        with pytest.raises(ConfigError, match="has no linearized model"):
            call()
    assert load_model(base, attach_untrained=True) is not None
    apply(str(base), adapter, tmp_path / "model")
    with pytest.raises(CheckpointError):
        apply(str(base), tmp_path, tmp_path / "model", force=True)
    assert load_model(tmp_path / "model") is not None  # a call that fails deletes nothing
    apply(str(base), adapter, tmp_path / "model", force=True)


def test_rows_without_linear_tokens_are_refused(base: Path, text: Path) -> None:
    with pytest.raises(ConfigError, match="at most two chunks"):
        small_recipe(base, text, sequence_length=16)
    assert small_recipe(base, text, sequence_length=16, transfer_steps=0).sequence_length == 16


def test_foreign_adapters_are_refused(base: Path, finished: tuple[Path, Linearization], tmp_path: Path) -> None:
    adapter = finished[0] / "adapter"
    other = make_base(tmp_path / "other", hidden_size=36)
    with pytest.raises(CheckpointError):
        apply(str(other), adapter, tmp_path / "model")
    with pytest.raises(CheckpointError, match="no adapter"):
        apply(str(other), other, tmp_path / "model")
    odd = shutil.copytree(adapter, tmp_path / "odd")
    weights = load_file(odd / "adapter_model.safetensors")
    name = next(name for name in weights if "feature_k" in name)
    weights[name.replace("layers.0", "layers.l")] = weights.pop(name)
    save_file(weights, odd / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"odd/adapter_model\.safetensors: .*layers\.l\."):
        apply(str(base), odd, tmp_path / "model")


def test_recipe_files(tmp_path: Path, base: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: {base}\ntransfer_rate: 0.5\ntexts: [here.txt]\n")
    (tmp_path / "here.txt").write_text("x")
    recipe = read_recipe(path, {"transfer_steps": 7})
    assert (recipe.transfer_rate, recipe.transfer_steps, recipe.texts) == (0.5, 7, (str(tmp_path / "here.txt"),))
    # What the file leaves open, a flag may give.
    path.write_text("chat: 0.1")
    assert read_recipe(path, {"chat_file": "chats.jsonl"}).chat == 0.1
    path.write_text("transfer_rat: 1")
    with pytest.raises(ConfigError, match="'transfer_rate'"):
        read_recipe(path, {})
    path.write_text("- a list")
    with pytest.raises(ConfigError, match="mapping"):
        read_recipe(path, {})
    with pytest.raises(ConfigError, match="known: ce, kl"):
        read_recipe(None, {"loss": "mse"})
