"""Choices of experts that nearly tie: told by margins of PyTorch's two runs, where these followed a runtime; of groups too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from still_kernels.hybrid_attention.ties import Selected, SelectionTies
from still_kernels.route.meaning import Inputs, margins, naive_route
from still_kernels.route.ties import RoutingTies
from still_kernels.ties import Ties, expected_ties
from tests.still_kernels.experts.inputs import ROUTERS, route_inputs

TIES = RoutingTies()
COUNTS = np.array([4, 5])


def scores_of(given: Inputs, went: torch.Tensor | None = None) -> Any:
    """What PyTorch's run tells of two calls that bring the tokens one after the other; the first sequence brings one token less."""
    found = margins(given)
    went = found[..., -1, :] > 0 if went is None else went
    told = torch.cat([found, went[:, :, None].to(found.dtype)], dim=2).float().numpy()
    lengths = [np.array([0, 0]), np.array([2, 2]), COUNTS]
    return TIES.scores(
        [
            (begin, {"present_length": end, "present_margins.4": told[:, begin[1] : end[1]]})
            for begin, end in itertools.pairwise(lengths)
        ]
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_margins_say_what_is_chosen(name: str) -> None:
    given = route_inputs(name, 2, 5)
    found = margins(given)[..., -1, :]
    expert, _ = naive_route(given)
    assert torch.equal((found > 0).nonzero()[:, 2].view(2, 5, -1), expert.sort(-1).values.long())
    chosen = found > 0
    least, most = found.where(chosen, torch.inf).amin(-1), found.where(~chosen, -torch.inf).amax(-1)
    assert torch.allclose(least, -most)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_experts_so_many_are_chosen_and_it_is_a_tie(name: str, dtype: torch.dtype) -> None:
    given = route_inputs(name, 2, 5, dtype)
    router, bias = (None if x is None else x[:1].expand_as(x).clone() for x in (given.router, given.bias))
    equal = replace(given, router=router, bias=bias)
    found = margins(equal)[..., -1, :]
    assert ((found > 0).sum(-1) == given.k).all()
    expert, _ = naive_route(equal)
    assert torch.equal((found > 0).nonzero()[:, 2].view(2, 5, -1), expert.sort(-1).values.long())
    assert abs(TIES.leads(scores_of(equal), scores_of(equal), COUNTS)[~4][0, :4]).max() < 1e-6


@pytest.mark.parametrize("name", ROUTERS)
def test_a_runtime_that_is_followed(name: str) -> None:
    """To the next expert, or group, where it nearly ties, and where it does not; and further than to the next."""
    given = route_inputs(name, 2, 5, torch.float64)
    own = replace(given, input=given.input.float(), router=given.router.float())
    clear = TIES.leads(scores_of(given), scores_of(own), COUNTS)[~4]
    assert clear.shape == (2, 5) and np.isinf(clear[0, 4]) and clear.min() > 1
    assert TIES.compare([], {~4: clear}).compared == 9 and not TIES.compare([], {~4: clear}).near_ties

    def turned(row: int) -> torch.Tensor:
        """Token 1 of sequence 1 goes to the next group (row 0), or to the next expert."""
        found = margins(given)
        went = found[..., -1, :] > 0
        at = found[1, 1, row]
        out, into = at.where(at > 0, torch.inf).argmin(), at.where(at <= 0, -torch.inf).argmax()
        size = found.shape[-1] // given.groups
        gone = torch.arange(12) // size == out // size if found.shape[2] - row > 1 else torch.arange(12) == out
        went[1, 1] = went[1, 1] & ~gone
        went[1, 1, into] = True
        return went

    for row in range(margins(given).shape[2]):
        noise = torch.zeros_like(given.input)
        noise[1, 1] = torch.randn(noise.shape[2], generator=torch.Generator().manual_seed(0), dtype=noise.dtype)
        for scale, wrong in ((1e-6, 1), (1.0, 0)):
            rough = replace(given, input=given.input + scale * noise)
            leads = TIES.leads(scores_of(given, turned(row)), scores_of(rough, turned(row)), COUNTS)
            found = TIES.compare([], leads)
            assert (found.wrong, found.near_ties) == (wrong, 1 - wrong), (row, scale)
            assert (np.delete(leads[~4].ravel(), 6) > 1).all() and found.widest == -leads[~4][1, 1]
    assert expected_ties({~4: np.full((1, 1), np.inf)}) == 0


def test_a_router_goes_where_it_is_told() -> None:
    given = route_inputs("softmax, normalized", 1, 2)
    expert, weight = naive_route(given)
    told = expert.clone()
    told[0, 0], told[0, 1] = torch.tensor([7, 2, 9]), -1
    other, shares = naive_route(given, told)
    assert other[0, 0].tolist() == [7, 2, 9] and torch.equal(other[0, 1], expert[0, 1])
    scores = (given.input[0, 0] @ given.router.T).softmax(-1)[[7, 2, 9]]
    assert torch.allclose(shares[0, 0], scores / scores.sum()) and torch.equal(shares[0, 1], weight[0, 1])


def test_all_experts_are_no_choice() -> None:
    scores = scores_of(replace(route_inputs("softmax", 2, 5), k=12))
    assert np.isinf(TIES.leads(scores, scores, COUNTS)[~4]).all()


def test_equal_scores_tie() -> None:
    given = route_inputs("softmax", 2, 5)
    assert TIES.closest(scores_of(replace(given, router=torch.zeros_like(given.router))), COUNTS) == 0
    assert TIES.closest(scores_of(given), COUNTS) > 0


def test_layers_that_select_and_route_are_told_apart() -> None:
    """Of a softmax model with experts that was linearized."""
    both = Ties([SelectionTies("q_head", {0: Selected(4, 1, 1)}), TIES])
    scores = scores_of(route_inputs("softmax", 2, 5))
    assert both.span == 8 and [type(op) for op in both.shown.each] == [SelectionTies]
    assert set(both.leads(scores, scores, COUNTS)) == {~4}
