"""Which differences of two salient caches are ties."""

from __future__ import annotations

import numpy as np

from still_kernels.hybrid_attention.ties import Selected, SelectionTies
from still_kernels.registry import ties_of

BATCH, HEADS, CHUNKS, SALIENT, DIM = 2, 3, 4, 2, 5
TIES = SelectionTies("q_head", {1: Selected(8, SALIENT, HEADS)})


def caches(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (BATCH, HEADS, CHUNKS * SALIENT)
    return {
        "present_salient_key.1": rng.standard_normal((*shape, DIM)),
        "present_salient_value.1": rng.standard_normal((*shape, DIM)),
        "present_salient_score.1": rng.standard_normal(shape),
        "present_kv_state.1": rng.standard_normal((BATCH, HEADS, DIM, DIM)),
    }


def told(scores: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
    """[B, HS, chunks, 2, C] of scores and of what is selected."""
    return np.stack([scores, np.zeros(scores.shape) if chosen is None else chosen], axis=-2)


def test_sequences_with_a_turned_tie_are_named_and_no_others() -> None:
    expected, other = caches(0), caches(1)
    actual = {name: value + 1e-3 for name, value in expected.items()}
    for name in actual:
        if "salient" in name:
            actual[name][0, 2, 2:4] = other[name][0, 2, 2:4]  # chunk 1: both slots hold other tokens
            actual[name][1, 0, 7] = other[name][1, 0, 7]  # chunk 3
    lead = np.full((BATCH, HEADS, CHUNKS), 1.0)
    lead[0, 2, 1] = 0.01
    given = ([(expected, actual)], {1: lead / 0.05})
    found = TIES.compare(*given)
    assert (found.compared, found.near_ties, found.wrong) == (BATCH * HEADS * CHUNKS, 1, 1)
    ((turned,),) = [TIES.turned(*given)]
    assert turned[1].tolist() == [True, False]  # the second sequence's differs without a tie


def test_what_a_layer_above_a_turned_tie_selects_is_not_compared() -> None:
    """In the same call and in later ones, of the same sequence alone."""
    ties = SelectionTies("q_head", {2: Selected(8, SALIENT, HEADS), 1: Selected(8, SALIENT, HEADS)})
    expected = caches(0) | {name.replace(".1", ".2"): x for name, x in caches(2).items()}
    first, second = ({name: value + 1e-3 for name, value in expected.items()} for _ in range(2))
    second["present_salient_key.1"][0, 2, 2:4] += 3.0
    for layer, sequence in ((2, 0), (2, 1)):
        second[f"present_salient_key.{layer}"][sequence, 0, 7] += 3.0
    lead = np.full((BATCH, HEADS, CHUNKS), 20.0)
    leads = {1: lead.copy(), 2: lead}
    leads[1][0, 2, 1] = 0.5
    calls = [
        (expected, first),
        (expected, second),
        (expected, {**second, "present_salient_key.1": first["present_salient_key.1"]}),
    ]
    found = ties.compare(calls, leads)
    a_layer = HEADS * CHUNKS
    assert (found.near_ties, found.wrong) == (1, 2)  # the second sequence's, in two calls
    assert found.compared == len(calls) * 2 * BATCH * a_layer - 2 * a_layer


def test_a_token_that_pytorch_errs_at_is_no_other_one() -> None:
    """Where PyTorch's own run is 0.1 off in a slot's key, a target that is 1 off holds the same token; where it is not, another."""
    expected = caches(0)
    actual = {name: value.copy() for name, value in expected.items()}
    key = "present_salient_key.1"
    actual[key][0, 2, 2] += 1
    actual[key][1, 0, 7] += 1
    own = np.zeros((2, BATCH, HEADS, CHUNKS * SALIENT))
    own[0, 0, 2, 2] = 0.1
    given = ([(expected, actual)], {1: np.full((BATCH, HEADS, CHUNKS), 2.0)})
    assert TIES.compare(*given).wrong == 2
    assert TIES.compare(*given, [{key: own}]).wrong == 1
    tied = ([(expected, actual)], {1: np.zeros((BATCH, HEADS, CHUNKS))})
    assert TIES.turned(*tied, [{key: own}])[0][1].tolist() == [False, True]


def test_a_chunk_that_pytorch_never_completed_is_no_tie() -> None:
    expected = caches(0)
    expected["present_salient_key.1"][:, :, -SALIENT:] = 0
    actual = {name: value.copy() for name, value in expected.items()}
    actual["present_salient_key.1"][0, 0, -1] = 1
    given = ([(expected, actual)], {1: np.zeros((BATCH, HEADS, CHUNKS - 1))})
    assert TIES.compare(*given).wrong == 1
    assert not TIES.turned(*given)[0][1].any()


def test_a_tie_is_one_by_the_errors_of_the_scores_compared() -> None:
    """Equal leads: where PyTorch's own run errs in that head's chunk it is a tie, in the next chunk and in another head it is none."""
    scores = np.linspace(1, 0, 8) * np.ones((1, HEADS, CHUNKS, 1))
    own = scores + 0.0
    own[0, 1, 0, 1] += 0.05  # the last that is selected
    leads = TIES.leads({1: told(scores)}, {1: told(own)}, np.array([8 * CHUNKS]))[1]
    assert leads[0, 1, 0] < 1 and (np.delete(leads[0, :, :2].ravel(), 2) > 1e6).all()
    assert np.isinf(leads[..., 2:]).all(), "chunks that were not promoted yet"


def test_a_selection_that_was_followed_is_held_to_the_scores() -> None:
    """PyTorch was told the third token in the place of the second: near ties where its scores err as much, else a mismatch; the last token
    in its place is one in both, and a selection that is PyTorch's own is no tie."""
    scores = np.linspace(1, 0, 8) * np.ones((1, HEADS, CHUNKS, 1))
    own = scores + 0.0
    own[0, :2, 0, 1] += 0.05
    chosen = np.zeros(scores.shape)
    chosen[..., :SALIENT] = 1
    chosen[0, 0, 0], chosen[0, 1, 0], chosen[0, 2, 0] = (
        np.eye(8)[[0, 2]].sum(0),
        np.eye(8)[[0, 7]].sum(0),
        np.eye(8)[[0, 2]].sum(0),
    )
    counts = np.array([8 * CHUNKS])
    leads = TIES.leads({1: told(scores, chosen)}, {1: told(own)}, counts)
    assert -1 < leads[1][0, 0, 0] < 0 and leads[1][0, 1, 0] < -1 and leads[1][0, 2, 0] < -1
    natural = TIES.leads({1: told(scores)}, {1: told(own)}, counts)[1]
    np.testing.assert_array_equal(leads[1][:, :, 1:], natural[:, :, 1:])
    alike = [(each := caches(0), each)]
    found = TIES.compare(alike, leads)
    assert (found.near_ties, found.wrong) == (1, 2) and found.widest == -leads[1].min()
    assert not TIES.compare(alike, {1: natural}).near_ties


def test_what_a_runtime_keeps_is_what_its_calls_add() -> None:
    """Each call's own promotions, whatever stands elsewhere; nothing of a sequence that has outgrown its slots."""
    first, second = caches(0), caches(1)
    first["present_length"], second["present_length"] = np.array([8 * 3, 8 * 2]), np.array([8 * 5, 8 * 7])
    key = "present_salient_key.1"
    selected = TIES.selected([first, second])[1]
    np.testing.assert_array_equal(selected[0, :, :SALIENT], first[key][0, :, :SALIENT].astype(np.float32))
    np.testing.assert_array_equal(
        selected[0, :, SALIENT : 3 * SALIENT], second[key][0, :, SALIENT : 3 * SALIENT].astype(np.float32)
    )
    assert not selected[0, :, 3 * SALIENT :].any() and not selected[1].any()


def test_ties_are_those_of_each_layers_own_cache() -> None:
    """A window is the same op, whose salient cache has no rows."""
    caches = [
        {"name": f"salient_key.{layer}", "shape": ["batch", HEADS, "slots", DIM], "growth": {"rows": rows, "per": 8}}
        for layer, rows in ((0, 0), (2, SALIENT), (5, 7))
    ]
    manifest = {"ops": {"HybridAttention": 1, "Attention": 1}, "still": {}, "model": {"kv_heads": HEADS}}
    assert not ties_of({**manifest, "states": caches[:1]}).each
    manifest["states"] = caches
    manifest["still"] = {"select_scope": "kv_group_max"}
    (found,) = ties_of(manifest).each
    assert found.scope == "kv_group_max"
    assert found.layers == {"2": Selected(8, SALIENT, HEADS), "5": Selected(8, 7, HEADS)}
    assert not ties_of({**manifest, "ops": {"Attention": 1, "Foreign": 1}}).each
