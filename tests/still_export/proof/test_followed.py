"""PyTorch selects what a target selected: all that follows from it is compared, and the selection is held to PyTorch's scores."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from still_export.errors import PackageError
from still_export.loading.torch import TorchModel
from still_export.mixers.cache import state_table
from still_export.mixers.hybrid_attention.module import HybridOpModule
from still_export.package.folder import Package
from still_export.proof.answers import Decisions, silent
from still_export.proof.cases import CaseSource
from still_export.proof.chains import Chain, empty_feed
from still_export.proof.constants import STORED_DRAWS
from still_export.proof.judge import Bounds, Report
from still_export.proof.layerwise import LayerwiseModel, _in_order
from still_export.proof.prompts import Prompts, Ranges
from still_export.proof.recorded import RecordedCases, record_cases
from still_export.proof.runs import DrawnOnce
from still_export.proof.selections import Selections, write_selections
from still_export.proof.sessions import Session, Subject
from still_export.proof.torch_cases import TorchCases
from still_export.proof.verify import Verifier
from tests.still_export.proof.test_layerwise import MANIFEST, source_of, tokens
from tests.still_export.tiny import CHUNK, VOCAB, still_model

RANGES = Ranges((1, 5 * CHUNK), 2 * CHUNK)


def test_what_is_told_is_selected() -> None:
    """By offsets and by keys, of one chunk of one head; what is told of no chunk is selected by scores."""
    layers = LayerwiseModel(MANIFEST, source_of(still_model("llama", torch.float32)))
    prompt = tokens(1, 6 * CHUNK)
    start = {**layers.empty_feed(1, 6 * CHUNK), "input_ids": prompt, "new_tokens": np.array([6 * CHUNK])}

    def answer(follow: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
        chain = Chain.of(start)
        return layers.run([Chain(start, chain.calls, follow)])[0][0]

    natural = answer({})
    chosen = natural["present_chosen.1"]
    salient = chosen.shape[3]
    told = np.full((*chosen.shape[:2], 4, salient), -1)
    free = [n for n in range(CHUNK) if CHUNK + n not in chosen[0, 0]]
    told[0, 0, 1] = sorted([*free[:1], *(chosen[0, 0][(chosen[0, 0] // CHUNK == 1).all(-1)][0] % CHUNK)[1:]])
    found = answer({1: told})
    slots = slice(salient, 2 * salient)
    for name in ("present_salient_key.1", "present_kv_state.1"):
        changed = np.abs(found[name] - natural[name]).reshape(len(chosen), chosen.shape[1], -1).any(-1)
        assert changed[0].tolist() == [True, *[False] * (chosen.shape[1] - 1)], name
    assert (found["present_salient_key.1"][0, 0, slots] != natural["present_salient_key.1"][0, 0, slots]).any()
    assert set(told[0, 0, 1] + CHUNK) <= set(found["present_chosen.1"][0, 0].ravel())
    np.testing.assert_array_equal(found["present_salient_key.0"], natural["present_salient_key.0"])
    keys = found["present_salient_key.1"] + np.float32(1e-3) * np.random.default_rng(0).standard_normal(
        found["present_salient_key.1"].shape, np.float32
    )
    keys[0, 1:] = 0
    again = answer({1: keys})
    for name, x in found.items():
        np.testing.assert_array_equal(again[name], x, err_msg=name)


@pytest.mark.parametrize(("slots", "width"), [(1, 4), (3, 7), (4, 4), (2, 9)])
def test_keys_are_told_by_the_tokens_in_order_that_are_nearest_in_sum(slots: int, width: int) -> None:
    apart = torch.rand(5, 2, slots, width, generator=torch.Generator().manual_seed(0))
    found = _in_order(apart)
    for row in np.ndindex(5, 2):
        sums = {c: sum(float(apart[row][s, at]) for s, at in enumerate(c)) for c in combinations(range(width), slots)}
        assert tuple(found[row].tolist()) == min(sums, key=lambda c: sums[c])


def test_tokens_that_both_half_precision_runs_have_far_off_are_told_by_pytorchs_own() -> None:
    """Their keys are no token's of the reference, which selects these tokens all the same."""
    asked, planted = Asked(None), still_model("llama", torch.float32)
    weight = planted.model.embed_tokens.weight
    with torch.no_grad():
        weight[3:12] += torch.randn(weight[3:12].shape, generator=torch.Generator().manual_seed(0))
    asked.cases.own = LayerwiseModel(asked.manifest, source_of(planted))
    asked.cases.begin(1)
    chain = asked.cases.prompts.drawn[1].chain
    right = asked.cases.own.run([chain])[0][-1]
    keys = {layer: right[f"present_salient_key.{layer}"] for layer in range(2)}
    case = asked.cases.draw([1], {1: Decisions(selected=keys)})[0]
    tokens = {layer: right[f"present_chosen.{layer}"] for layer in keys}
    offsets = {layer: np.stack([_offsets(head) for head in x[0]])[None] for layer, x in tokens.items()}
    for follow, same in ((offsets, True), (keys, False)):
        found = asked.cases.reference.run([Chain(chain.start, chain.calls, follow)])[0][-1]
        assert (
            all((found[name] == case.expected[-1][name]).all() for name in found if name in case.expected[-1]) == same
        )


def _offsets(places: np.ndarray) -> np.ndarray:
    """Of the places [n, k] of a head's tokens, those in each chunk that has some."""
    return np.array(sorted(places[(places >= 0).all(-1)].tolist())) % CHUNK


class Asked:
    """PyTorch beside its own runner, whose first layer selects what `choose` says."""

    def __init__(self, choose: Any, **settings: Any) -> None:
        model, planted = (still_model("llama", torch.float32, **settings) for _ in range(2))
        self.table = state_table(model.config, torch.float32)
        self.manifest: dict[str, Any] = {
            "target": "onnx",
            "model": {
                "all_logits": False,
                "vocab_size": VOCAB,
                "layer_types": [],
                "dtype": "float32",
                "kv_heads": model.config.num_key_value_heads,
            },
            "still": {"select_scope": model.config.still.select_scope},
            "ops": {"HybridAttention": 1},
            "states": [s.to_dict() for s in self.table],
            "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
            "portable": "of these weights",
            "files": {},
        }
        self.package = Package(Path("package"), self.manifest)
        next(m for m in planted.modules() if isinstance(m, HybridOpModule)).watch = choose
        self.session = Session(TorchModel(self.manifest, planted))
        reference = LayerwiseModel(self.manifest, source_of(model), dtype=torch.float64)
        own = LayerwiseModel(self.manifest, source_of(model))
        self.cases = TorchCases(self.manifest, reference, own, RANGES)

    def select(self, path: Path, seed: int = 0) -> Path:
        """What the runner selects, in a file."""
        prompts = Prompts(self.manifest, partial(empty_feed, self.table), replace(RANGES, seed=seed))
        write_selections(self.session, prompts, self.package, path, silent)
        return path

    def judged(self, cases: CaseSource) -> Report:
        """What verify says of the runner."""
        verifier = Verifier(self.package, cases, Subject(self.package), replays=0)
        answers = verifier.ask(self.session, [cases.begin(number) for number in range(cases.count)])
        drawn = cases.draw(range(cases.count), answers.decisions if cases.uses_decisions else {})
        judged = [each for number, case in enumerate(drawn) for each in verifier.compare(number, case, answers)]
        bounds = Bounds([each.case for each in judged])
        return verifier.judge(judged, bounds, answers, "")


def other(number: Tensor, keys: Tensor, selected: Tensor) -> Tensor:
    """Another token of chunk 1 than scores say."""
    turned = selected.clone()
    free = torch.ones(*selected.shape[:3], keys.shape[3], dtype=torch.bool).scatter_(3, selected, False)
    turned[..., 0] = free.int().argmax(-1)
    return torch.where((number == 1)[:, None, :, None], turned.sort(-1).values, selected)


def test_a_runtime_that_selects_as_pytorch_is_asked_once() -> None:
    asked = Asked(None)
    times, draw = 0, asked.cases.draw

    def counted(*args: Any) -> Any:
        nonlocal times
        times += 1
        return draw(*args)

    asked.cases.draw = counted  # type: ignore[method-assign]
    report = asked.judged(asked.cases)
    assert report.passed and times == 1 and not report.selections.near_ties


@pytest.mark.parametrize("settings", [{}, {"salient_by_layer": (5, 1, 3)}])
def test_a_wrong_selection_is_found_and_what_follows_from_it_is_not(settings: dict[str, Any]) -> None:
    """PyTorch selects it, too, and finds every state of the prompt right; its scores say that it is wrong."""
    asked = Asked(other, **settings)
    report = asked.judged(asked.cases)
    assert not report.passed and report.selections.wrong and not report.selections.near_ties
    assert not [r for r in report.mismatches if r.case.startswith("prefill")]


def test_answers_in_a_file_follow_a_runtime_as_pytorch_beside_it_does(tmp_path: Path) -> None:
    """Without its selections in the file what follows from them is a mismatch."""
    asked = Asked(other)
    live = asked.judged(asked.cases)
    chosen = Selections.read(asked.select(tmp_path / "chosen.npz"), asked.package)
    asked = Asked(other)
    chosen.begin(asked.cases)
    record_cases(asked.cases, asked.package, tmp_path / "calls.npz", decisions=chosen.decisions)
    read = RecordedCases(tmp_path / "calls.npz", asked.package)
    report = asked.judged(read)
    assert read.has_decisions and report.selections == live.selections
    assert report.mismatches == live.mismatches and len(report.outputs) == len(live.outputs)
    alone = Asked(other)
    record_cases(alone.cases, alone.package, tmp_path / "alone.npz")
    read = RecordedCases(tmp_path / "alone.npz", alone.package)
    assert not read.has_decisions and alone.judged(read).mismatches


def test_selections_of_something_else_are_refused(tmp_path: Path) -> None:
    asked = Asked(None)
    path = asked.select(tmp_path / "chosen.npz", seed=1)
    chosen = Selections.read(path, asked.package)
    with pytest.raises(PackageError, match="other prompts"):
        chosen.begin(asked.cases)
    with pytest.raises(PackageError, match="other weights"):
        Selections.read(path, Package(Path("package"), {"portable": "of others", "files": {}}))
    with pytest.raises(PackageError, match="holds no recorded calls"):
        RecordedCases(path, asked.package)
    with np.load(path) as held:
        arrays = dict(held)
    (name, keys), *_ = [(name, x) for name, x in arrays.items() if name != "selections" and x.any()]
    np.savez(path, **{**arrays, name: keys + 1})
    with pytest.raises(PackageError, match="was changed after"):
        Selections.read(path, asked.package)
    with pytest.raises(PackageError, match="holds no selections"):
        Selections.read(tmp_path / "none.npz", asked.package)


@pytest.mark.parametrize("plant", ["none", "a factor", "another sequence's", "the length"])
def test_states_that_are_kept_and_put_into_other_rows_are_asked(plant: str) -> None:
    """A prefix cache, a file, and rows that are not those in which a state was made."""
    asked = Asked(None)
    model = asked.session.model
    put, taken = model.put, dict[int, dict[str, np.ndarray]]()

    def wrong(row: int, arrays: dict[str, np.ndarray], length: int) -> None:
        if plant == "a factor":
            arrays = {name: x * np.float32(1 + 1e-3) if x.dtype == np.float32 else x for name, x in arrays.items()}
        if plant == "another sequence's":
            arrays = taken.setdefault(length, arrays)
        put(row, arrays, length + (plant == "the length"))

    if plant != "none":
        model.put = wrong
    report = asked.judged(asked.cases)
    restored = {each.case for each in report.outputs if each.case.endswith("restored")}
    assert len(restored) == 1 and "5 rows" in restored.pop()
    assert report.passed == (plant == "none")
    assert all(each.case.endswith("restored") for each in report.mismatches)


def test_a_reference_in_which_later_tokens_change_earlier_answers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(None)
    assert asked.cases.causality().passed
    kind = type(still_model("llama", torch.float32).model.layers[1].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda mlp, x: own(mlp, x) + 1e-4 * x.mean(1, keepdim=True))
    assert not asked.cases.causality().passed


def test_a_disturbance_says_which_rows_amplify(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer that multiplies differences of a few tokens, rows of those grow in layers behind it; all others stay as they were."""
    kind = type(still_model("llama", torch.float32).model.layers[0].mlp)
    own = kind.forward

    def steep(mlp: Any, x: Tensor) -> Tensor:
        few = x[..., :1].abs() > 2.2
        return own(mlp, x) + few * torch.sin(300 * x) / 30

    monkeypatch.setattr(kind, "forward", steep)
    asked = Asked(None)
    cases = DrawnOnce(asked.cases)
    numbers = range(cases.count)
    before = cases.draw(numbers)
    name = before[1].name
    with monkeypatch.context() as half:
        half.setattr(asked.cases.own, "dtype", torch.float16)
        assert not cases.disturb({name}, 0)
    assert cases.disturb({name}, 0)
    after = cases.draw(numbers)
    assert [n for n in numbers if after[n].amplified] == [1]
    keys = [rows[0]["present_window_key.1"][0] for rows in (before[1].own, after[1].amplified)]
    known = np.isfinite(keys[0]) & (keys[0] > 0)
    shares = keys[1][known] / keys[0][known]
    assert np.median(shares) < 2 and shares.max() > 3


@pytest.mark.parametrize("cache", ["float16", "int8"])
def test_numbers_about_halfway_between_two_of_a_caches_type_may_be_stored_either_way(cache: str) -> None:
    """What other own runs store otherwise may err by as much; lengths, and other cases, stay as they are."""
    asked = Asked(None, cache=cache, sizes={"head_dim": 12})
    cases = DrawnOnce(asked.cases)
    cases.draw(range(cases.count))
    plain = Asked(None)
    assert not DrawnOnce(plain.cases).store_again({cases._drawn[1].name}, 0)  # its caches are float32
    for draw in range(STORED_DRAWS):
        assert cases.store_again({cases._drawn[1].name}, draw)
    after = cases.draw(range(cases.count))
    assert [n for n in range(cases.count) if after[n].amplified] == [1]
    grown = {name: np.nanmax(more - after[1].own[0][name], initial=0) for name, more in after[1].amplified[0].items()}
    assert min(grown["present_window_value.0"], grown["logits"]) > 1e-6 and not grown["present_length"]
