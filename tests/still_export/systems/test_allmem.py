"""AllMem as it is read here: a layer against its formula token by token, pieces, stages, a package that is proven."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from still_export.errors import ConfigError
from still_export.linearization.folder import apply
from still_export.linearization.linearize import linearize
from still_export.linearization.objectives import make_students
from still_export.linearization.recipe import Recipe, preset, read_recipe
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL
from still_export.mixers.projections import rotate
from still_export.mixers.trainable import SOFTMAX, attention_mode
from still_export.models import attach_untrained
from still_export.models.load import load_model
from tests.still_export import linearized
from tests.still_export.tiny import plain_model, random_ids
from tests.still_export.training import make_base, make_text, small_values
from tests.still_graphs.test_test_time_memory import looped

CHUNK = 24
TYPES = linearized.types_of("allmem")


def attached(family: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    return linearized.attached("allmem", family, dtype, 0.3, chunk_size=CHUNK)


def unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-5)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def formula(module: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What a layer gives before its last projection, [B, T, H, D]."""

    def projected(of: Any) -> Tensor:
        return hidden @ of.weight.T + of.bias

    dim = module.head_dim
    query, key, value = (p(hidden).unflatten(-1, (-1, dim)) for p in (module.q_proj, module.k_proj, module.v_proj))
    kept = key.shape[2]
    group = query.shape[2] // kept
    x = {
        "query": unit(silu(query * module.memory_query[0] + module.memory_query[1])).unflatten(2, (kept, group)),
        "key": unit(silu(key * module.memory_key[0] + module.memory_key[1])),
        "value": silu(value),
        "rate": (1 + projected(module.rate_proj).exp()).log().unflatten(-1, (kept, 3)),
        "momentum": projected(module.momentum_proj).sigmoid(),
    }
    x = {name: tensor.detach() for name, tensor in x.items()}
    read = [
        looped({n: t[row] for n, t in x.items()}, module.memory_weight.detach(), CHUNK) for row in range(len(hidden))
    ]
    rows = torch.stack(read).flatten(2, 3)
    rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.memory_norm
    query, key = (rotate(y, cos[:, :, None], sin[:, :, None]) for y in (query, key.repeat_interleave(group, dim=2)))
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * dim**-0.5
    behind = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
    weight = logits.masked_fill((behind < 0) | (behind >= CHUNK), -torch.inf).softmax(-1)
    window = torch.einsum("bhqk,bkhd->bqhd", weight, value.repeat_interleave(group, dim=2))
    return window + rows * silu(projected(module.memory_gate))[..., None]


def test_a_layer_is_its_formula() -> None:
    """150 tokens are more than six chunks; a constant that is planted is seen."""
    for module, given, output in linearized.seen_by_layers(attached()):
        inputs = given["hidden_states"].detach(), *given["position_embeddings"]
        expected = formula(module, *inputs).flatten(2)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-8)
        with torch.no_grad():
            module.rate_proj.bias[1] += 0.1
        assert (formula(module, *inputs).flatten(2) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_pieces_and_padding_change_nothing(family: str) -> None:
    linearized.demand_pieces(attached(family), 1e-7)


def test_an_untrained_layer_is_its_window_and_its_teacher_the_base() -> None:
    plain = plain_model("llama")
    model = attach_untrained(plain_model("llama"), StillConfig(layer_types=TYPES, chunk_size=CHUNK))
    ids = random_ids(2, CHUNK)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain(ids).logits, rtol=0, atol=1e-10)
        ids = random_ids(2, 60)
        with attention_mode(make_students(model), SOFTMAX):
            torch.testing.assert_close(model(ids, use_cache=False).logits, plain(ids).logits, rtol=0, atol=1e-10)


def recipe(base: Path, text: Path, **changes: Any) -> Recipe:
    """Of a few steps on the CPU."""
    values = small_values(base, text) | dict(transfer_steps=6, lora_rank=4, chunk_size=CHUNK, layer_types=TYPES)
    return read_recipe(preset("allmem"), {**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linearized model in `model`, its base in `base`."""
    place = tmp_path_factory.mktemp("allmem")
    base, text = make_base(place / "base"), make_text(place / "text.txt")
    result = linearize(recipe(base, text), place / "model")
    assert [stage.name for stage in result.stages] == ["transfer", "finetune"]
    assert result.stages[0].losses[-1] < result.stages[0].losses[0]
    return place


def test_stages_train_the_memory(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder / "model")
    assert model.config.still.chunk_size == CHUNK
    own = {n for n in load_file(folder / "model/adapter/adapter_model.safetensors") if "lora_" not in n}
    assert own == {
        f"model.layers.{i}.self_attn.{n}" for i in (0, 2) for n in model.model.layers[i].self_attn.fresh_names()
    }
    again = apply(str(folder / "base"), folder / "model/adapter", tmp_path / "again")
    ids = torch.randint(0, 256, (1, 100))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.slow
def test_the_folder_becomes_a_proven_package(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linearized.demand_proven(folder / "model", tmp_path / "package", ("HybridAttention", "TestTimeMemory"), capsys)


def test_what_does_not_hold_is_refused(tmp_path: Path) -> None:
    base = tmp_path
    with pytest.raises(ConfigError, match="--salient-per-chunk: options of STILL; layers of --mixer allmem"):
        recipe(base, base, salient_per_chunk=8)
    with pytest.raises(ConfigError, match="names hybrid_attention"):
        recipe(base, base, layer_types=("hybrid_attention", FULL))
