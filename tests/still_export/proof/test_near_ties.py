"""What a near tie leaves open is counted, and everything else is compared."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from still_export.models.description import describe_model
from still_export.package.folder import Package
from still_export.proof.cases import Case, row_errors
from still_export.proof.chains import HIDDEN
from still_export.proof.constants import LAYER_UNIT, NORMED, RESIDUAL_SUMS, SHARP_ROW, UNIT
from still_export.proof.judge import Bounds
from still_export.proof.judged import Judged, OutputReport
from still_export.proof.verify import Verifier
from still_kernels.route.ties import RoutingTies
from still_kernels.select_blocks.ties import BlockTies
from still_kernels.ties import Ties
from tests.still_export.tiny import MIXED, still_model


def reported(
    name: str, sides: tuple[np.ndarray, ...], given: dict[str, float], mean: float = 1.0, coarse: float = 1.0
) -> OutputReport:
    """Of what is right, PyTorch's own run and what was found; `given` says what may be the cause of an error, and how large."""
    right, own, found = sides
    case = Case("case", [], [], own=[{name: row_errors(right, own)}], own_mean={name: mean})
    causes: Any = {cause: value if cause == "times" else {name: value} for cause, value in given.items()}
    judged = Judged.of(case, [({name: right}, {name: found})], **causes)
    return judged.report(name, Bounds([case], coarse, sharp=True, fixed={name}))


@pytest.mark.parametrize(("wrong", "tied", "passes"), [(8, 8, True), (8, 9, False), (9, 8, False), (10, 10, False)])
def test_rows_of_choices_that_nobody_tells_are_not_held(wrong: int, tied: int, passes: bool) -> None:
    """Tokens 6 to 9, of a sequence with two tokens of padding behind; 10 is none."""
    draw = np.random.default_rng(0)
    right = np.concatenate([draw.standard_normal((1, 4, 16)), np.zeros((1, 2, 16))], axis=1)
    found = right + 1e-3 * (right != 0) * draw.standard_normal(right.shape)
    found[0, wrong - 6] += 0.5
    lead = np.full((1, 12), np.inf)
    lead[0, tied], lead[0, 3] = 0.2, -0.9
    case = Case("case", [], [], leads={~1: np.full((1, 12), 5.0), ~0: lead})
    case.own = [{"logits": row_errors(right, right + 1e-3 * (right != 0))}]
    case.unreported = Ties([RoutingTies()]).open_tokens(case.leads)
    assert case.open_tokens().sum() == 2
    call = {"logits": right, "present_length": np.array([10])}
    judged = Judged.of(case, [(call, {**call, "logits": found})])
    assert (Bounds([case], dtype="float16").judge(case, "logits", [judged.errors[0]["logits"]]).share <= 1) == passes


def test_choices_of_several_heads_are_of_one_token() -> None:
    leads = {~0: np.array([[9.0, 0.5, 9.0, 9.0, 9.0, 9.0]])}
    assert Ties([BlockTies(2)]).open_tokens(leads)[0].tolist() == [[True, False, False]]
    assert not Ties([SimpleNamespace(watched="")]).open_tokens(leads)  # what states show is compared by them


@pytest.mark.parametrize(("layer", "wrong", "passes"), [(1, 5, True), (0, 5, False), (1, 4, False), (2, 5, True)])
def test_rows_that_later_layers_keep_behind_untold_choices_are_not_held(layer: int, wrong: int, passes: bool) -> None:
    """Token 5 of nine ties in layer 0."""
    draw = np.random.default_rng(0)
    right = draw.standard_normal((1, 3, 9, 16))
    found = right + 1e-3 * draw.standard_normal(right.shape)
    found[0, 1, wrong] += 0.5
    lead = np.full((1, 9), np.inf)
    lead[0, 5] = 0.3
    name = f"present_key.{layer}"
    case = Case("case", [], [], leads={~0: lead}, own=[{name: row_errors(right, right + 1e-3)}])
    case.unreported = Ties([RoutingTies()]).open_tokens(case.leads)
    errors = Judged.of(case, [({name: right}, {name: found})], {name: 2}).errors[0][name]
    assert (Bounds([case]).judge(case, name, [errors]).share <= 1) == passes


@pytest.mark.parametrize(
    ("layer", "row", "call", "passes"), [(1, 0, 0, False), (1, 1, 0, True), (0, 1, 0, False), (2, 1, 1, True)]
)
def test_what_follows_from_a_choice_that_nobody_followed_is_counted(
    layer: int, row: int, call: int, passes: bool
) -> None:
    """Sequence 1 chose otherwise in layer 1 of the first call, on a near tie."""
    draw, name = np.random.default_rng(0), f"present_kv_state.{layer}"
    right = [{name: draw.standard_normal((2, 3, 9, 16)), "logits": draw.standard_normal((2, 1, 16))} for _ in range(2)]
    found = [{n: x + 1e-3 * draw.standard_normal(x.shape) for n, x in each.items()} for each in right]
    found[call][name][row, 1, 4] += 0.5
    own = [{n: row_errors(x, x + 1e-3) for n, x in each.items()} for each in right]
    turned = [{1: np.array([False, True])}, {1: np.array([False, False])}]
    judged = Judged.of(Case("case", [], [], own=own), list(zip(right, found, strict=True)), turned=turned)
    errors = [each[name] for each in judged.errors]
    assert (Bounds([judged.case]).judge(judged.case, name, errors).share <= 1) == passes
    assert judged.open_rows == (2 + 2 * 27 if layer else 2)  # logits of both calls, and what the layer keeps


@pytest.mark.parametrize(("fault", "passes"), [("", True), ("all times 1.005", False), ("one times 1.01", False)])
def test_a_sum_of_alike_features_may_err_by_their_rounding(fault: str, passes: bool) -> None:
    """Each of 460 features near 0.63 falls to the same number of bfloat16: 0.4 of 290, where float16 errs by 0.03."""
    features = torch.rand(1, 9, 460, 64, generator=torch.Generator().manual_seed(0)) * 1e-3 + 0.6311
    right, own, found = (
        features.to(kind).float().sum(2).numpy() for kind in (torch.float32, torch.float16, torch.bfloat16)
    )
    if fault == "all times 1.005":
        found = found * 1.005
    elif fault:
        found[0, 3, 7] *= 1.01
    name = "present_z_state.3"
    case = Case("case", [], [], own=[{name: row_errors(right, own)}], own_mean={name: 1e-2})
    for rounds in (False, True):
        judged = Judged.of(case, [({name: right}, {name: found})], summed={name: UNIT} if rounds else {})
        report = judged.report(name, Bounds([case], 1.5))
        assert report.passed == (rounds and passes) and report.max_abs == pytest.approx(np.abs(found - right).max())


@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (6.0, False)])
def test_a_row_that_one_token_makes_may_err_by_its_rounding(off: float, passes: bool) -> None:
    """PyTorch's own run draws that token's rounding once, here as almost none; others draw again."""
    random = np.random.default_rng(0)
    right = random.normal(size=(1, 2, 96, 64)).astype(np.float32) * 1e-2
    own = right + random.normal(size=right.shape).astype(np.float32) * 1e-6
    right[0, 1, 61] += 20 * random.normal(size=64).astype(np.float32)
    own[0, 1, 61] = right[0, 1, 61] * (1 + 1e-7)
    found = own.copy()
    found[0, 1, 61] = right[0, 1, 61] * (1 + off * 2.0**-12)
    for given in ({}, {"summed": LAYER_UNIT}):
        assert reported("present_kv_state.1", (right, own, found), given).passed == (passes and bool(given))


@pytest.mark.parametrize(("off", "passes"), [(4.0, True), (14.0, False)])
def test_a_large_row_may_err_as_far_as_others_do_in_parts_of_their_size(off: float, passes: bool) -> None:
    """Numbers of a row share roundings, about two units of float16 here; of one large row PyTorch draws almost none."""
    random = np.random.default_rng(0)
    sizes = random.normal(size=(1, 6, 14, 8)), random.lognormal(size=(1, 6, 14, 1))
    right = sizes[0].astype(np.float32) * sizes[1].astype(np.float32)
    right[0, 5, 5] *= 4 * np.abs(right).max() / np.abs(right[0, 5, 5]).max()
    shared = random.normal(size=(1, 6, 14, 1)).astype(np.float32) * 2 * 2.0**-11
    shared[0, 5, 5] = 2.0**-14
    found = right.copy()
    found[0, 5, 5] *= 1 + off * 2.0**-11
    for times in (0.0, SHARP_ROW):
        given = {"summed": LAYER_UNIT, "times": times}
        report = reported("present_recurrent_state.1", (right, right * (1 + shared), found), given)
        assert report.passed == (passes and bool(times))


@pytest.mark.parametrize(("off", "passes"), [(10.0, True), (1e4, False)])
def test_rows_that_are_all_zeros_are_judged(off: float, passes: bool) -> None:
    """Where PyTorch's own run says something else: parts of no size bound nothing, and are no NaN, which would hide every row."""
    right = np.zeros((1, 2, 4096, 4), np.float32)
    own, found = right + np.float32(10), right + np.float32(10)
    found[0, 1, 7] = off
    given = {"summed": LAYER_UNIT, "times": SHARP_ROW}
    assert reported("present_kv_state.1", (right, own, found), given, 10.0).passed == passes


@pytest.mark.parametrize(("value", "passes"), [(23296.0, True), (23312.0, False)])
def test_a_layers_output_may_be_the_next_number_of_float16(value: float, passes: bool) -> None:
    """SmolLM2's first token at layer 27: both neighbours of what is right, where PyTorch's own run happens to be near."""
    right = np.random.default_rng(0).normal(size=(1, 129, 64)).astype(np.float32)
    own = right.astype(np.float16).astype(np.float32)
    right[0, 0, 5] = 23281.1
    own[0, 0, 5], found = right[0, 0, 5] + 1.1, own.copy()
    found[0, 0, 5] = value
    for given in ({}, {"written": RESIDUAL_SUMS * LAYER_UNIT}):
        assert reported(f"present_{HIDDEN}.27", (right, own, found), given).passed == (passes and bool(given))


@pytest.mark.parametrize(("units", "passes"), [(1.4, True), (2.5, False)])
@pytest.mark.parametrize(
    ("name", "shape", "row"),
    [("present_window_value.29", (1, 3, 128, 64), (0, 0, 121)), ("logits", (1, 2, 49152), (0, 1))],
)
def test_a_row_may_share_the_rounding_of_what_was_normed(
    name: str, shape: tuple[int, ...], row: tuple[int, ...], units: float, passes: bool
) -> None:
    """Values and logits of a token of which one normed number is all: its rounding is a factor of its row, and of no other row."""
    rng = np.random.default_rng(0)
    right = rng.normal(size=shape).astype(np.float32)
    right[row] *= 4
    own = right + rng.normal(size=right.shape).astype(np.float32) * 1e-4
    own[row] = right[row]
    found = own.copy()
    found[row] *= 1 + units * LAYER_UNIT
    for given in ({}, {"written": NORMED * LAYER_UNIT}):
        assert reported(name, (right, own, found), given).passed == (passes and bool(given))


@pytest.mark.parametrize("side", [0, 1])
def test_no_row_may_err_by_what_is_no_number(side: int) -> None:
    right = np.ones((1, 2, 8, 4), np.float32)
    sides = [right, right.copy()]
    sides[side][0, 1, 3, 2] = np.inf
    name = "present_kv_state.1"
    case = Case("case", [], [], own=[{name: row_errors(right, right)}], own_mean={name: 1.0})
    judged = Judged.of(case, [({name: sides[0]}, {name: sides[1]})], summed={name: LAYER_UNIT})
    assert np.isinf(judged.errors_of_output(name)[0]).any()
    assert not judged.report(name, Bounds([case], sharp=True)).passed


@pytest.mark.parametrize(("off", "passes"), [(0.8, True), (2.0, False)])
def test_a_mean_may_err_by_what_features_are_rounded_to(off: float, passes: bool) -> None:
    """Sums of features times values on a GPU: PyTorch's own run keeps features in float32 and errs a quarter as far."""
    rng = np.random.default_rng(0)
    right = rng.normal(size=(1, 4, 128, 64)).astype(np.float32)
    noise = rng.uniform(-UNIT, UNIT, right.shape).astype(np.float32)
    own, found = right * (1 + noise / 4), right * (1 + off * noise)
    mean = float(np.abs(own - right).mean())
    for averaged in ({}, {"averaged": UNIT}):
        given = {"summed": UNIT, "times": SHARP_ROW, **averaged}
        report = reported("present_kv_state.0", (right, own, found), given, mean, 1.5)
        assert report.passed == (passes and bool(averaged))


@pytest.mark.parametrize(("dtype", "coarse", "count"), [("float16", 1.5, 2), ("float16", 1.0, 0), ("float32", 1.5, 0)])
def test_only_gpus_in_float16_round_features(dtype: str, coarse: float, count: int) -> None:
    model = still_model("llama", torch.float32, layer_types=MIXED)
    manifest = describe_model(model)
    manifest = {**manifest, "model": {**manifest["model"], "dtype": dtype}}
    target: Any = SimpleNamespace(coarse=coarse)
    verifier = Verifier(Package(Path(), manifest), None, target)  # type: ignore[arg-type]
    for found, state in ((verifier.summed, "z_state"), (verifier.averaged, "kv_state")):
        assert sum(name.startswith(f"present_{state}.") for name in found) == count
    assert len(verifier.summed) == count and (not count or set(verifier.averaged) >= set(verifier.summed))
