"""Layer by layer over many calls at once, PyTorch answers what it answers call by call."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.loading.torch import TorchModel
from still_export.models.build import family_of
from still_export.models.load import Source, open_source
from still_export.models.read.weights import Deferred
from still_export.package.calls import Arrays, next_feed
from still_export.proof.chains import Chain, ChainCall, nothing
from still_export.proof.layerwise import MARGINS, LayerwiseModel
from still_kernels.forms import has_kernels
from still_kernels.ties import CHOSEN
from tests.still_export.linear_models import FAMILIES, SELDOM, linear_model
from tests.still_export.tiny import CHUNK, MIXED, VOCAB, still_model

MANIFEST: dict[str, Any] = {"model": {"all_logits": False}}


def source_of(model: Any) -> Source:
    """A model in memory as a source of weights."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}  # a tied one once
    return Source(family_of(model.config.model_type), model.config, weights, model.generation_config)


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, VOCAB, shape)


def asked(model: Any) -> list[Chain]:
    """A prompt with steps, a ragged batch, and a chain that is told nothing of its states."""

    def start(rows: int, room: int) -> Arrays:
        return model.empty_feed(rows, room)  # type: ignore[no-any-return]

    def call(*shape: int, counts: list[int] | None = None) -> ChainCall:
        new = [shape[1]] * shape[0] if counts is None else counts
        return ChainCall(tokens(*shape), np.array(new))

    prompt, ragged = 2 * CHUNK + 3, 3 * CHUNK + 1
    steps = [call(1, 1) for _ in range(CHUNK)]
    return [
        Chain(start(1, prompt + CHUNK), [call(1, prompt), *steps]),
        Chain(start(3, ragged), [call(3, ragged, counts=[ragged, 0, CHUNK + 1])]),
        Chain(start(1, 5), [ChainCall(tokens(1, 5), np.array([5]), nothing)]),
    ]


def by_calls(model: TorchModel, chain: Chain) -> list[Arrays]:
    feed, found = {name: x.copy() for name, x in chain.start.items()}, []
    for call in chain.calls:
        found.append(model.infer({**feed, "input_ids": call.tokens, "new_tokens": call.new_tokens}))
        feed = next_feed(found[-1], call.tokens)
    return found


def check(source: Source) -> None:
    whole, layers = TorchModel(MANIFEST, source.read()), LayerwiseModel(MANIFEST, source)
    chains = asked(layers)
    for chain, answers in zip(chains, layers.run(chains), strict=True):
        for call, right, answer in zip(chain.calls, by_calls(whole, chain), answers, strict=True):
            kept = [name for name in right if name in ("logits", "present_length") or call.keep(name)]
            told = (f"present_{MARGINS}.", f"present_{CHOSEN}.")
            assert sorted(n for n in answer if not n.startswith(told)) == sorted(kept)
            for name in kept:
                assert answer[name].dtype == right[name].dtype
                np.testing.assert_array_equal(answer[name], right[name], err_msg=name)


@pytest.mark.parametrize("still", [{}, {"layer_types": MIXED}], ids=["hybrid", "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "smollm3"])
def test_answers_are_those_of_the_whole_model(family: str, still: dict[str, Any]) -> None:
    check(source_of(still_model(family, torch.float32, **still)))


@pytest.mark.parametrize("name", [*FAMILIES, *SELDOM])
def test_every_linear_family_runs_layer_by_layer(name: str, tmp_path: Path) -> None:
    linear_model(name).save_pretrained(tmp_path)
    check(open_source(tmp_path))


def test_half_precision_of_rounded_results_is_half_precision() -> None:
    """Linear layers in float32 whose results are rounded differ from half ones by the order of a sum."""
    model = still_model("llama", torch.float16)
    half, wide = LayerwiseModel(MANIFEST, source_of(model)), LayerwiseModel(MANIFEST, source_of(model.float()))
    model = model.half()
    chain = Chain(half.empty_feed(1, 20), [ChainCall(tokens(1, 20), np.array([20]))])
    (ours,), (exact,) = half.run([chain])[0], wide.run([chain])[0]
    native = TorchModel(MANIFEST, model).infer(
        {**chain.start, "input_ids": tokens(1, 20), "new_tokens": np.array([20])}
    )
    own, rounded = (np.abs(each["logits"] - exact["logits"]).mean() for each in (ours, native))
    assert 0 < own < 2 * rounded and rounded < 2 * own


def test_one_layer_is_in_memory() -> None:
    model = still_model("llama", torch.float32)
    source, live, most = source_of(model), set(), []

    def read(name: str, value: torch.Tensor) -> Any:
        def once() -> torch.Tensor:
            live.add(name)
            most.append(name)
            return value

        return Deferred(value.shape, value.dtype, once)

    streamed = Source(
        source.family, source.config, {n: read(n, w) for n, w in source.weights.items()}, source.generation
    )
    layers = LayerwiseModel(MANIFEST, streamed)
    layers.run(asked(layers))
    order = [name.split(".")[2] for name in most if name.startswith("model.layers.")]
    assert sorted(most) == sorted(source.weights), "each weight is read once"
    assert order == sorted(order)


def test_pytorch_answers_in_the_place_of_kernels() -> None:
    """What a package runs does not say what is right, on no device."""
    seen = []

    def watch(model: Any) -> None:
        for layer in model.model.layers:
            layer.register_forward_hook(lambda *_: seen.append(has_kernels(torch.device("cuda"))))

    layers = LayerwiseModel(MANIFEST, source_of(still_model("llama", torch.float32)), prepare=watch)
    layers.run([Chain(layers.empty_feed(1, 5), [ChainCall(tokens(1, 5), np.array([5]))])])
    assert seen and not any(seen) and has_kernels(torch.device("cuda")) and not has_kernels(torch.device("cpu"))
