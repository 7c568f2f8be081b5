"""What a near tie leaves open is counted, and everything else is compared."""

from types import SimpleNamespace

import numpy as np
import pytest

from still_export.proof.cases import Case, row_errors
from still_export.proof.judge import Bounds, Judged
from still_kernels.route.ties import RoutingTies
from still_kernels.select_blocks.ties import BlockTies
from still_kernels.ties import Ties


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
    case.own, case.own_mean = [{"logits": row_errors(right, right + 1e-3 * (right != 0))}], {"logits": 1e-3}
    case.unreported = Ties([RoutingTies()]).open_tokens(case.leads)
    assert case.open_tokens().sum() == 2
    call = {"logits": right, "present_length": np.array([10])}
    judged = Judged.of(case, [(call, {**call, "logits": found})])
    assert judged.report("logits", Bounds([case])).passed == passes


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
    case = Case("case", [], [], leads={~0: lead}, own=[{name: row_errors(right, right + 1e-3)}], own_mean={name: 1e-3})
    case.unreported = Ties([RoutingTies()]).open_tokens(case.leads)
    judged = Judged.of(case, [({name: right}, {name: found})], {name: 2})
    assert judged.report(name, Bounds([case])).passed == passes


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
    case = Case("case", [], [], own=own, own_mean=dict.fromkeys(own[0], 1e-3))
    judged = Judged.of(case, list(zip(right, found, strict=True)), turned=turned)
    assert judged.report(name, Bounds([case])).passed == passes
    assert judged.open_rows == (2 + 2 * 27 if layer else 2)  # logits of both calls, and what the layer keeps
