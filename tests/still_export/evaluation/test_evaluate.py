"""Evaluation: numbers that can be computed by hand, variants that switch off what they say, files that are written."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from still_export.errors import ConfigError, DataError
from still_export.evaluation.evaluate import (
    DEFAULT_HAYSTACK,
    VARIANTS,
    EvaluationOptions,
    answered,
    bits_per_byte,
    load_any,
    measure,
    measurements,
    without,
    write_evaluation,
)
from still_export.evaluation.positions import perplexity_by_position, ranges
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.mixers.layers import Deployment
from still_export.models import attach_untrained
from still_export.texts.replies import greedy
from tests.still_export.tiny import CHUNK, plain_model, random_ids, still_model
from tests.still_export.training import byte_tokenizer, chat_tokenizer, make_base, make_text


def wide_model() -> Any:
    """A STILL model with the byte tokenizer's vocabulary."""
    return attach_untrained(plain_model("llama", torch.float32, vocab_size=257), StillConfig(chunk_size=CHUNK))


class Uniform(nn.Module):
    """Knows nothing: every token has the same logit."""

    class config:
        vocab_size = 257

    device = torch.device("cpu")

    def forward(self, ids: Tensor, **_: Any) -> Any:
        class Output:
            logits = torch.zeros(*ids.shape, 256)

        return Output


def test_bits_per_byte_of_ignorance() -> None:
    """256 equal choices are 8 bits a byte, whatever the context and the text."""
    for context in (16, 100):
        assert bits_per_byte(Uniform(), byte_tokenizer(), DEFAULT_HAYSTACK, context, 1000) == pytest.approx(
            8.0, rel=1e-6
        )
    with pytest.raises(ConfigError, match="fewer than a context"):
        bits_per_byte(Uniform(), byte_tokenizer(), "short", 100, 1000)


def test_perplexity_by_position() -> None:
    assert ranges(100) == [(0, 100)] and ranges(5000) == [(0, 1024), (1024, 2048), (2048, 4096), (4096, 5000)]
    found = perplexity_by_position(Uniform(), byte_tokenizer(), DEFAULT_HAYSTACK, 5000, 10_000)
    assert found == pytest.approx({"0-1024": 256, "1024-2048": 256, "2048-4096": 256, "4096-5000": 256})
    model = attach_untrained(
        plain_model("llama", torch.float32, vocab_size=257),
        StillConfig(chunk_size=CHUNK, deployment=Deployment(capacity_tokens=1200)),
    )
    text = DEFAULT_HAYSTACK[:1200]
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    found = perplexity_by_position(model, byte_tokenizer(), text, 1200, 1200)
    expected = {"0-1024": losses[:1023].mean().exp().item(), "1024-1200": losses[1023:].mean().exp().item()}
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="more text"):
        perplexity_by_position(model, byte_tokenizer(), text, 2000, 2000)


def test_bits_per_byte_is_the_cross_entropy() -> None:
    model = wide_model()
    text = DEFAULT_HAYSTACK[:200]
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    nats = nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert bits_per_byte(model, byte_tokenizer(), text, 200, 200) == pytest.approx(nats / math.log(2), rel=1e-5)


def test_answered_needs_every_token_right() -> None:
    ids = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    said = [(7, 8), (7, 9), (9, 8)]

    class Fixed(nn.Module):
        device = torch.device("cpu")

        def forward(self, ids: Tensor, logits_to_keep: int, **_: Any) -> Any:
            assert logits_to_keep == 3
            logits = torch.zeros(3, 3, 10)
            for row, tokens in enumerate(said):
                for column, token in enumerate(tokens):
                    logits[row, column, token] = 1
            return type("Output", (), {"logits": logits})

    assert answered(Fixed(), None, ids, [2, 2, 2]) == 1
    assert answered(Fixed(), None, ids, [2, 2, 1]) == 2  # the last row's first token is no part of its answer


def test_variants_switch_off_what_they_say() -> None:
    model = still_model("llama", torch.float64)
    ids = random_ids(1, 8 * CHUNK)
    logits = {}
    with torch.no_grad():
        for variant in VARIANTS:
            with without(model, variant):
                logits[variant] = model(ids, use_cache=False).logits
                cached = model(ids, use_cache=True).logits
            torch.testing.assert_close(cached, logits[variant], rtol=0, atol=1e-9)
        again = model(ids, use_cache=False).logits
    torch.testing.assert_close(again, logits["still"], rtol=0, atol=0)
    for variant in VARIANTS[1:]:
        assert (logits[variant] - logits["still"])[:, : 2 * CHUNK].abs().max() < 1e-9
        assert (logits[variant] - logits["still"])[:, 2 * CHUNK :].abs().max() > 1e-4


def test_window_only_forgets() -> None:
    """Far tokens change nothing: three layers see at most three times two chunks back."""
    model = still_model("llama", torch.float64)
    ids = random_ids(1, 10 * CHUNK)
    other = ids.clone()
    other[:, :CHUNK] = 60 - other[:, :CHUNK]
    with torch.no_grad(), without(model, "window_only"):
        difference = (model(ids, use_cache=False).logits - model(other, use_cache=False).logits)[:, -CHUNK:]
    assert difference.abs().max() < 1e-6
    with torch.no_grad():
        difference = (model(ids, use_cache=False).logits - model(other, use_cache=False).logits)[:, -CHUNK:]
    assert difference.abs().max() > 1e-4


def test_without_its_linear_part_far_tokens_are_the_salient_ones() -> None:
    """Every token salient: the linear part holds none, so it gives nothing."""
    model = still_model("llama", torch.float64)
    few = still_model("llama", torch.float64)
    for module in model.modules():
        if isinstance(module, StillAttention):
            module.still = replace(module.still, salient_per_chunk=CHUNK)
    ids = random_ids(1, 6 * CHUNK)
    for changed, each in ((False, model), (True, few)):
        with torch.no_grad():
            whole = each(ids, use_cache=False).logits
            with without(each, "no_linear_part"):
                difference = (each(ids, use_cache=False).logits - whole).abs().max()
        assert (difference > 1e-4) == changed


@pytest.mark.slow
def test_teacher_and_still_get_the_same_questions(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    text = make_text(tmp_path / "text.txt", 500)
    options = EvaluationOptions(
        texts=(str(text),), context_lengths=(64,), text_tokens=256, lengths=(600,), depths=2, samples=1
    )
    models = load_any(str(base), None, "auto")
    assert set(models) == {"teacher"}
    still = wide_model()
    done: list[str] = []
    result = measure({**models, "still": still}, byte_tokenizer(), options, advance=done.append)
    assert len(done) == measurements(["teacher", "still"], options) == (1 + len(VARIANTS)) * 4
    assert list(result.bits_per_byte) == ["teacher", *VARIANTS] and "@ 64" in next(iter(result.bits_per_byte["still"]))
    write_evaluation(result, options, tmp_path / "out", "the command")
    saved = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert saved["command"] == "the command" and saved["bits_per_byte"]["teacher"] == result.bits_per_byte["teacher"]
    assert result.table() in (tmp_path / "out" / "evaluation.md").read_text()


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needle"):
        EvaluationOptions(tasks=("needel",))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0\1")
    with pytest.raises(DataError, match="zero bytes"):
        measure({"teacher": Uniform()}, byte_tokenizer(), EvaluationOptions(texts=(str(binary),)))
    with pytest.raises(ConfigError, match="does not fit"):
        measure({"teacher": Uniform()}, byte_tokenizer(), EvaluationOptions(lengths=(40,)))


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_greedy_is_the_most_likely_continuation_of_every_row() -> None:
    """Rows of different lengths, with a cache: what the model says without one, up to the end's token."""
    model, tokenizer = wide_model(), chat_tokenizer(TEMPLATE)
    prompts = [list(range(40, 40 + n)) for n in (5, 3 * CHUNK + 1)]
    replies = greedy(model, tokenizer, prompts, 6)
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt + reply])
        with torch.no_grad():
            likely = model(ids, use_cache=False).logits[0].argmax(-1)
        assert reply == likely[len(prompt) - 1 : -1].tolist()
        assert len(reply) == 6 or int(likely[-1]) == tokenizer.eos_token_id


def test_a_teacher_that_generates_is_the_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    ids = random_ids(1, 4 * CHUNK)
    with torch.no_grad():
        fast, writing = (
            load_any(str(base), None, "float32", generates=g)["teacher"](ids).logits for g in (False, True)
        )
    torch.testing.assert_close(writing, fast, rtol=0, atol=1e-4)
