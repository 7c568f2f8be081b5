"""A published MoH folder, which says "llama": `linearize --mixer moh` makes of it what its code computes."""

import json
from pathlib import Path

import pytest
import torch

from still_export.models.load import load_model
from tests.still_export.linear_models import linear_model
from tests.still_export.training import byte_tokenizer, make_text
from tests.still_export.verbs import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published folder and what is made of it."""
    place = tmp_path_factory.mktemp("moh")
    linear_model("moh_llama", vocab_size=257).save_pretrained(place / "published")
    file = place / "published/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "llama"}))
    byte_tokenizer().save_pretrained(place / "published")
    text = make_text(place / "text.txt", 1500)
    asked = ("--text", text, "--sequence-length", 64, "--validation-rows", 2, "--quiet")
    assert not call("linearize", place / "published", "--mixer", "moh", "-o", place / "model", *asked)
    return place


def test_it_is_the_formula(folder: Path) -> None:
    """Other numbers of heads, and all of them, are seen."""
    ids = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = load_model(folder / "model")(ids).logits
        softmax = load_model(folder / "published", attach_untrained=True)(ids[:, :9]).logits
    right, other = (
        linear_model("moh_llama", vocab_size=257, **changes).double()(ids).logits
        for changes in ({}, {"routed_heads": 3})
    )
    scale = float(right.abs().max())
    assert float((found - right).abs().max()) <= 2e-5 * scale
    assert float((other - right).abs().max()) > 1e-2 * scale
    assert float((softmax - right[:, :9]).abs().max()) > 1e-2 * scale


@pytest.mark.slow
def test_its_package_is_verified(folder: Path) -> None:
    assert not call("export", folder / "model", "-o", folder / "package", "--no-native", "--quiet")
    assert not call("verify", folder / "package", "--quiet")
