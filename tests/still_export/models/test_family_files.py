"""A family is a file, or a few kindred ones are; its first line says what its layers are."""

import re
import sys
from collections.abc import Iterable

import pytest

from still_export.models.families.linear_families import FILES, LINEAR_FAMILIES

SAID = {
    "full_attention": "softmax|attention|positions",
    "windowed_attention": "window",
    "latent_attention": "latents",
    "block_attention": "blocks",
    "lightning_attention": "Lightning",
    "gated_delta_net": "gated delta rule",
    "delta_net": "delta rule",
    "gated_linear_attention": "gated linear attention",
    "short_conv": "short convolution",
    "mamba": r"\bMamba\b(?!-)",
    "mamba2": "Mamba-2",
    "mamba3": "Mamba-3",
    "parallel_mamba2": "Mamba-2.*both in each layer",
    "rwkv6": "RWKV-6",
    "rwkv7": "RWKV-7",
    "radlads": "RWKV-6 or RWKV-7",
    "rg_lru": "RG-LRU",
    "feed_forward": "",
}
"""By mixer how a first sentence says it."""
OWN = [family for family in LINEAR_FAMILIES.values() if ".systems." not in family.still_config.__module__]


def unsaid(text: str, mixers: Iterable[str]) -> list[str]:
    """Mixers of which the first sentence of a docstring says nothing."""
    sentence = " ".join(text.split("\n\n")[0].split())
    return [mixer for mixer in mixers if not re.search(SAID[mixer], sentence)]


@pytest.mark.parametrize("family", OWN, ids=lambda family: family.name)
def test_the_first_line_says_the_layers(family: object) -> None:
    config = family.still_config  # type: ignore[attr-defined]
    file = sys.modules[config.__module__]
    assert file in FILES
    assert not unsaid(file.__doc__ or "", {place.mixer for place in config.places.values()})
