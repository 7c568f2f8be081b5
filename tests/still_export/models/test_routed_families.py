"""NAtS-L, Landmark attention and Routing Transformer: what they choose."""

from pathlib import Path
from typing import Any

import torch

from still_export.models.load import load_model
from still_export.systems.nats_l.family import NATS
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, calm_seed, far, ids, pieces

CLEAR = 1e-5
"""A choice of a smaller lead may be made otherwise."""


def watched(model: Any) -> list[torch.Tensor]:
    """What layers are told of their choices, margins [B, T, 1, E] each, in the calls from now on."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        if hasattr(module, "watch"):
            module.watch = lambda margins: found.append(margins)
    return found


@torch.no_grad()
def test_chunks_go_where_their_means_say(tmp_path: Path) -> None:
    theirs = linear_model(NATS, seed=calm_seed(NATS))
    theirs.save_pretrained(tmp_path)
    ours, theirs = load_model(tmp_path), theirs.double()
    theirs(ids())
    both = torch.cat([went.flatten() for went in theirs.choices])
    assert both.any() and not both.all()
    seen = watched(ours)
    ours(ids(), use_cache=False)
    for margins, went, gaps in zip(seen, theirs.choices, theirs.gaps, strict=True):
        last = margins[:, 63::64, 0, : went.shape[-1]] > 0  # at the last tokens of whole chunks
        assert bool((gaps > CLEAR).any()) and torch.equal(last[gaps > CLEAR], went[gaps > CLEAR])


@torch.no_grad()
def test_tokens_go_to_the_nearest_centroid(tmp_path: Path) -> None:
    theirs = linear_model("routing_transformer", seed=calm_seed("routing_transformer"))
    theirs.save_pretrained(tmp_path)
    ours, theirs = load_model(tmp_path), theirs.double()
    theirs(ids())
    seen = watched(ours)
    ours(ids(), use_cache=False)
    for margins, cluster, gaps in zip(seen, theirs.choices, theirs.gaps, strict=True):
        found = margins[:, :, 0].unflatten(-1, (cluster.shape[-1], -1)).argmax(-1)
        assert torch.equal(found[gaps > CLEAR], cluster[gaps > CLEAR])
        assert len(cluster.unique()) == theirs.config["num_clusters"]


@torch.no_grad()
def test_landmarks_choose_the_blocks_that_are_read(tmp_path: Path) -> None:
    """Two of up to eleven blocks, in pieces and steps."""
    changes = {"mem_freq": 5, "cache_top_k": 2}
    theirs = linear_model("llama_with_landmark", **changes)
    theirs.save_pretrained(tmp_path)
    some = ids()[:, :70]
    found = pieces(load_model(tmp_path), some, [40, 1, 20, *[1] * 9])[0]
    assert far(found, theirs.double()(some).logits) <= LOGITS
