"""The oracle of each system's family fails for a model with a constant that is not the published one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.discovery import systems
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.load import load_model
from still_export.systems.nats_l.family import NATS
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, far, ids

SYSTEMS = Path(__file__).resolve().parents[3] / "docs/reference/systems.md"
PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rat": ({}, {"chunk_size": 8}),
    "rat, window": ({"interleave_step": 2, "window_size": 19}, {"window_size": 18}),
    "flux_qwen3": ({}, {"sink_size": 1}),
    "parallax": ({}, {"rope_theta": 1010.0}),
    "local_linear": ({}, {"ridge": 3.03}),
    "llama_with_landmark": ({}, {"mem_freq": 13}),
    "routing_transformer": ({}, {"window_size": 10}),
    "moh_llama": ({}, {"routed_heads": 3}),
    "inline": ({"kernel_size": 3}, {"feature_map": "relu"}),
    "polaformer": ({}, {"alpha": 4.04}),
    "mirrorla": ({}, {}),  # a reflection of channels, and one of heads, that is a little off
    "mirrorla,heads": ({}, {}),
    NATS: ({}, {"decay_for_non_gdn_blocks": False}),
}
"""By family: what its configuration has, and what is planted."""


def test_every_family_of_a_system_has_one() -> None:
    own = [name for name in systems() if name.startswith("still_export.")]
    found = {n for n, f in LINEAR_FAMILIES.items() if f.still_config.__module__.rpartition(".")[0] in own}
    assert found and found <= {name.split(",")[0] for name in PLANTED}


def test_every_system_says_what_it_is() -> None:
    """A row of the page each: source, what is ours, what is left out."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in SYSTEMS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    folders = {name.rpartition(".")[2] for name in systems() if name.startswith("still_export.")}
    assert {row[0].strip("`") for row in rows} == folders
    assert all(len(row) == 4 and all(row) for row in rows)


@pytest.mark.parametrize("case", PLANTED)
@torch.no_grad()
def test_a_planted_constant_is_seen(case: str, tmp_path: Path) -> None:
    family, (changes, planted) = case.split(",")[0], PLANTED[case]
    theirs, tokens = linear_model(family, **changes), ids(tokens=300)
    theirs.save_pretrained(tmp_path / "right")
    expected = theirs.double()(tokens).logits
    other = linear_model(family, **changes)
    other.config |= planted
    if not planted:
        mirrors = {"mirrorla": ("mirrors", 2, 3), "mirrorla,heads": ("head_mirrors", 1, 2)}[case]
        other.tensors[f"model.layers.1.attn.{mirrors[0]}"][mirrors[1:]] += 0.02
    other.save_pretrained(tmp_path / "planted")
    right, wrong = (
        far(load_model(tmp_path / n)(tokens, use_cache=False).logits, expected) for n in ("right", "planted")
    )
    assert right <= 3 * LOGITS and wrong > 1e2 * LOGITS
