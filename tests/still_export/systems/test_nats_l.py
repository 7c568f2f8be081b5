"""NAtS-L: the cache of a model whose choice gives every other chunk to the rule, in PyTorch and in ONNX Runtime's runner."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.mixers.cache import StillCache
from still_export.models.load import load_model
from still_export.runtime.base import SPARE_ROWS, Runner
from still_export.runtime.ort import OrtModel
from still_export.systems.nats_l.family import NATS
from still_kernels.routed_attention.spec import ROUTED_CHUNK
from tests.still_export.linear_models import VOCAB, linear_model
from tests.still_export.models.test_linear_families import LOGITS, far, pieces
from tests.still_export.verbs import call

HALF = 10
TOKENS = 2 * HALF * ROUTED_CHUNK + 10
LAYERS = 0, 2


def halved() -> Any:
    """A model whose layers give chunks of odd tokens to softmax, those of even ones to the rule; its own float32 errs by 8e-6."""
    model = linear_model(NATS, max_position_embeddings=TOKENS + 100, seed=1)
    model.tensors["model.embeddings.weight"][:, 0] = torch.where(torch.arange(VOCAB) % 2 > 0, 4.0, -4.0)
    for layer in LAYERS:
        model.tensors[f"model.layers.{layer}.attn_norm.weight"][0] = 1
        asked = model.tensors[f"model.layers.{layer}.attn.nats_layer.weight"]
        asked.zero_()[:, 0] = torch.tensor([1.0, -1.0]).repeat(len(asked) // 2)
    return model


def tokens(count: int = TOKENS) -> torch.Tensor:
    """Chunks of odd and of even tokens in turn, [1, T]."""
    ids = torch.randint(2, VOCAB // 2, (1, count), generator=torch.Generator().manual_seed(1)) * 2
    return ids + (torch.arange(count) // ROUTED_CHUNK + 1) % 2


def rows(states: dict[str, Any]) -> list[int]:
    return [states[f"key.{layer}"].shape[2] for layer in LAYERS]


@torch.no_grad()
def test_pytorch_keeps_the_rows_of_half_the_chunks(tmp_path: Path) -> None:
    theirs, ids = halved(), tokens()
    theirs.save_pretrained(tmp_path)
    model, sizes = load_model(tmp_path), [400, 1, 47, 64, 300, TOKENS - 814, 1, 1]
    expected = theirs.double()(ids).logits
    assert all(torch.equal(went[0, :, 0], torch.arange(2 * HALF) % 2 == 0) for went in theirs.choices)
    found, cache = pieces(model, ids, sizes)
    assert far(found, expected) <= LOGITS
    for layer in LAYERS:
        states = cache.states()[layer]
        assert bool((states["kept_chunks"] == HALF).all())
        assert HALF * ROUTED_CHUNK < states["key"].shape[2] < 0.8 * TOKENS
        assert not states["key"][:, :, HALF * ROUTED_CHUNK + 10 :].any()
    whole = StillCache.empty(model.config)
    model(ids, past_key_values=whole, logits_to_keep=1)
    for one, other in zip(whole.states(), cache.states(), strict=True):
        for name, state in one.items():
            least = min(state.shape[-2], other[name].shape[-2]) if name in ("key", "value") else None
            first, second = (x[..., :least, :] if least else x for x in (state, other[name]))
            assert float((first - second).abs().max()) <= LOGITS * max(1.0, float(first.abs().max())), name


@pytest.mark.slow
def test_a_package_has_the_rows_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through prompts in pieces, steps, sequences that come and go, and states that are taken and loaded."""
    halved().save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--quiet", "--no-native") == 0
    checked = call("verify", tmp_path / "package", "--lengths", "1,300", "--decode-steps", "70", "--quiet")
    assert checked == 0, capsys.readouterr().out
    assert call("inspect", tmp_path / "package") == 0
    assert "at most " in capsys.readouterr().out
    model, ids = OrtModel(tmp_path / "package", threads=1), tokens().numpy()[0]
    model.start()
    model.prefill(ids)
    assert max(rows(model.state_arrays())) <= HALF * ROUTED_CHUNK + model.prefill_tokens + SPARE_ROWS + 2 * ROUTED_CHUNK
    taken = {name: array.copy() for name, array in model.take().items()}
    assert rows(taken) == [(HALF + 1) * ROUTED_CHUNK] * 2
    following = [model.step(ids[n : n + 1]) for n in range(70)]

    def goes_on(other: Runner, sequence: int) -> None:
        for n, expected in enumerate(following):
            found = other.step(np.repeat(ids[n : n + 1], other.batch))
            assert np.abs(found[sequence] - expected[0]).max() <= 1e-4

    model.start(2)
    model.feed(np.stack([ids[:5], ids[5:10]]))
    model.put(1, taken, TOKENS)
    goes_on(model, 1)
    model.load(taken, np.array([TOKENS]))
    goes_on(model, 0)
