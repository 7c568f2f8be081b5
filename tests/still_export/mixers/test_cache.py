"""generate() and the cache: batches of unequal prompts, growth, capacity, refused operations."""

import logging

import pytest
import torch
from transformers import DynamicCache

from still_export.errors import CapacityError, PaddingError, UnsupportedError
from still_export.mixers.cache import StillCache, hear_cache
from still_export.mixers.hybrid_attention import module as attention
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_kernels.hybrid_attention import call as dispatch
from tests.still_export.tiny import CHUNK, MIXED, padded, random_ids, still_model
from tests.tolerances import REFERENCE

layers = pytest.mark.parametrize("layer_types", [None, MIXED], ids=["hybrid", "mixed"])


@layers
def test_batch_of_unequal_prompts_equals_single_ones(
    layer_types: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = still_model("smollm3", layer_types=layer_types)
    rows = [random_ids(1, n, seed=n)[0] for n in (29, 3, 17, 16)]
    ids, mask = padded(rows)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=23, do_sample=False)
    assert "padding_side='left'" not in caplog.text
    for i, row in enumerate(rows):
        alone = model.generate(row[None], max_new_tokens=23, do_sample=False)
        assert torch.equal(batch[i, ids.shape[1] :], alone[0, len(row) :])


def test_beams_and_sampling() -> None:
    model = still_model("llama", layer_types=MIXED)
    ids, mask = padded([random_ids(1, 19)[0], random_ids(1, 11)[0]])
    kwargs = dict(attention_mask=mask, max_new_tokens=9)
    beams = model.generate(ids, num_beams=3, do_sample=False, **kwargs)
    alone = model.generate(ids[1:, :11], max_new_tokens=9, num_beams=3, do_sample=False)
    assert torch.equal(beams[1, 19:], alone[0, 11:])
    torch.manual_seed(0)
    first = model.generate(ids, do_sample=True, temperature=2.0, num_return_sequences=2, **kwargs)
    torch.manual_seed(1)
    second = model.generate(ids, do_sample=True, temperature=2.0, num_return_sequences=2, **kwargs)
    assert first.shape == (4, 28) and not torch.equal(first, second)


@layers
def test_a_ragged_batch_continues_with_further_ragged_calls(layer_types: tuple[str, ...] | None) -> None:
    """Chat turns: each row continues at its own length, a row may bring nothing."""
    model = still_model("llama", layer_types=layer_types)
    rows = [random_ids(1, n, seed=n)[0] for n in (40, 21)]
    cache = StillCache.empty(model.config)
    with torch.no_grad():
        for a, b in [((0, 9), (0, 4)), ((9, 9), (4, 20)), ((9, 40), (20, 21))]:
            ids, mask = padded([rows[0][slice(*a)], rows[1][slice(*b)]])
            logits = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits
        assert cache.length is not None and cache.length.tolist() == [40, 21]
        for i, row in enumerate(rows):
            expected = model(row[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[i, -1], expected, rtol=0, atol=REFERENCE[torch.float64])


def test_second_generate_continues_the_cache() -> None:
    model = still_model("mistral")
    cache = StillCache.empty(model.config)
    first = model.generate(random_ids(1, 12), max_new_tokens=10, do_sample=False, past_key_values=cache)
    prompt = torch.cat([first, random_ids(1, 5, seed=9)], dim=1)
    second = model.generate(prompt, max_new_tokens=10, do_sample=False, past_key_values=cache)
    assert torch.equal(second, model.generate(prompt, max_new_tokens=10, do_sample=False))


def test_only_tensors_that_nobody_else_has_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a call writes into the cache's state; states that were given or handed out stay as they are."""
    asked: list[bool] = []

    def kernel(*arguments: object, in_place: bool) -> object:
        asked.append(in_place)
        return dispatch.hybrid_attention(*arguments, in_place=in_place)

    monkeypatch.setattr(attention, "kernel", kernel)
    model = still_model("llama")
    cache = StillCache.empty(model.config)
    ids = random_ids(1, 4)
    with torch.no_grad():
        for _ in range(2):
            model(ids, past_key_values=cache)
        assert asked == [True] * 6  # 3 layers
        assert cache.length is not None
        known = cache.states(), cache.length
        model(ids, past_key_values=cache)
        given = StillCache.from_states(model.config, *known)
        model(ids, past_key_values=given)
        assert len(asked) == 6
        model(ids, past_key_values=given)
        assert asked == [True] * 9


@pytest.mark.gpu
def test_generation_in_place_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 32  # of the sizes that the kernels have, as the head size
    model = still_model("llama", layer_types=MIXED, chunk_size=chunk, sizes={"head_dim": 64, "hidden_size": 48})
    model = model.to("cuda", torch.float32)
    ids = random_ids(2, 3 * chunk).cuda()
    mine = model.generate(ids, max_new_tokens=2 * chunk, do_sample=False)
    monkeypatch.setattr(HybridLayer, "owned", property(lambda self: False, lambda self, value: None), raising=False)
    assert torch.equal(mine, model.generate(ids, max_new_tokens=2 * chunk, do_sample=False))


def test_overflow_decodes_beyond_the_capacity() -> None:
    model = still_model("llama", overflow="fold_oldest", capacity_tokens=4 * CHUNK)
    ids = random_ids(2, 12)
    out = model.generate(ids, max_new_tokens=5 * CHUNK, do_sample=False)
    with torch.no_grad():
        cache = StillCache.empty(model.config)
        whole = model(out[:, :-1], past_key_values=cache).logits
    assert torch.equal(whole[:, 11:].argmax(-1), out[:, 12:])
    assert cache.states()[0]["salient_key"].shape[2] == 2 * 3


def test_capacity_error_and_lazy_growth() -> None:
    model = still_model("llama", capacity_tokens=5 * CHUNK)
    cache = StillCache.empty(model.config)
    ids = random_ids(1, 6 * CHUNK)
    with torch.no_grad():
        model(ids[:, :CHUNK], past_key_values=cache)
        assert cache.states()[0]["salient_key"].shape[2] == 0
        model(ids[:, CHUNK : 4 * CHUNK], past_key_values=cache)
        assert 0 < cache.states()[0]["salient_key"].shape[2] <= 3 * 3
        with pytest.raises(CapacityError, match="capacity"):
            model(ids[:, 4 * CHUNK :], past_key_values=cache)


@layers
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_left_padding_equals_single_rows(layer_types: tuple[str, ...] | None, use_cache: bool) -> None:
    """Tokens, logits in their columns, hidden states, and what a pipeline passes beside: positions of its own."""
    model = still_model("smollm3", layer_types=layer_types)
    rows = [random_ids(1, n, seed=n)[0] for n in (29, 3, 17, 16)]
    width = 29
    ids, mask = torch.zeros(4, width, dtype=torch.int64), torch.zeros(4, width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    close = dict(rtol=0, atol=REFERENCE[torch.float64])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=use_cache, output_hidden_states=True)
        last = model(ids, attention_mask=mask, use_cache=use_cache, logits_to_keep=2).logits
        column = model(ids, attention_mask=mask, use_cache=use_cache, logits_to_keep=torch.tensor([width - 1])).logits
        embedded = model(
            inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, use_cache=use_cache
        ).logits
    made = model.generate(ids, attention_mask=mask, max_new_tokens=23, do_sample=False, use_cache=use_cache)
    for i, row in enumerate(rows):
        with torch.no_grad():
            alone = model(row[None], output_hidden_states=True)
        start = width - len(row)
        torch.testing.assert_close(whole.logits[i, start:], alone.logits[0], **close)
        torch.testing.assert_close(embedded[i, start:], alone.logits[0], **close)
        torch.testing.assert_close(last[i], alone.logits[0, -2:], **close)
        torch.testing.assert_close(column[i], alone.logits[0, -1:], **close)
        for ours, theirs in zip(whole.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(ours[i, start:], theirs[0], **close)
        single = model.generate(row[None], max_new_tokens=23, do_sample=False)
        assert torch.equal(made[i, width:], single[0, len(row) :])


@pytest.mark.parametrize("mask", [[1, 1, 0, 1, 1], [0, 1, 0, 1, 0]])
def test_padding_between_tokens_is_refused(mask: list[int]) -> None:
    model = still_model("llama")
    ids = random_ids(2, 5)
    both = torch.tensor([[1] * 5, mask])
    with pytest.raises(PaddingError, match="between tokens"):
        model(ids, attention_mask=both)
    with pytest.raises(PaddingError, match="between tokens"):
        model.generate(ids, attention_mask=both, max_new_tokens=2)


def test_prefill_in_chunks_is_for_unpadded_batches() -> None:
    model = still_model("llama")
    ids, mask = padded([random_ids(1, 23)[0], random_ids(1, 4)[0]])
    with pytest.raises(PaddingError, match="prefill_chunk_size"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, prefill_chunk_size=7)
    chunked = model.generate(ids[:1], max_new_tokens=9, prefill_chunk_size=7, do_sample=False)
    assert torch.equal(chunked, model.generate(ids[:1], max_new_tokens=9, do_sample=False))


def test_contradictions_are_refused() -> None:
    model = still_model("llama")
    cache = StillCache.empty(model.config)
    ids = random_ids(2, 6)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(PaddingError, match=r"\[6, 6\]"):
            model(ids[:, :1], attention_mask=torch.tensor([[1] * 6 + [1], [1] * 4 + [0, 0, 1]]), past_key_values=cache)
        with pytest.raises(PaddingError, match="shape"):
            model(ids, attention_mask=torch.ones(2, 3))
        with pytest.raises(PaddingError, match="position_ids"):
            model(ids, position_ids=torch.arange(6)[None] + 2)
        with pytest.raises(UnsupportedError, match="DynamicCache"):
            model(ids, past_key_values=DynamicCache())
    with pytest.raises(UnsupportedError, match="promoted"):
        cache.crop(2)


def test_reset_and_row_operations() -> None:
    model = still_model("llama", layer_types=MIXED)
    ids = random_ids(2, 20)
    cache = StillCache.empty(model.config)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(3)
        following = model(ids[:1, :1].expand(3, 1), past_key_values=cache).logits
        expected = model(torch.cat([ids[1:], ids[:1, :1]], 1), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(following, expected.expand_as(following), rtol=0, atol=REFERENCE[torch.float64])
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, first)


@pytest.mark.parametrize("own", ["past_key_values", "cache_params", "cache"])
def test_a_layer_hears_its_cache_by_the_name_of_later_transformers(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5.24 on layers are given `cache`."""
    made: dict[str, type[torch.nn.Module]] = {}
    exec(
        f"import torch\nclass Layer(torch.nn.Module):\n    def forward(self, hidden, {own}=None, **kwargs): return {own}, kwargs",
        made,
    )
    monkeypatch.setattr("still_export.mixers.cache.CACHE", "cache")
    layer = hear_cache(made["Layer"]())
    assert layer(1, cache="c", mask=2) == ("c", {"mask": 2}) and layer(1, "c") == ("c", {})
    if own != "cache":
        monkeypatch.setattr("still_export.mixers.cache.CACHE", "past_key_values")
        assert hear_cache(made["Layer"]())(1, cache="c") == (None, {"cache": "c"})
