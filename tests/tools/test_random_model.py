"""Sources of random weights: files that safetensors reads, sparse ones with holes, shards that the index names."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.benchmarks.random_model import PIECE, SPARSE, drawn, drawn_once, main, write


@pytest.mark.parametrize("part", [1, SPARSE])
def test_a_file_is_one_of_safetensors(part: int, tmp_path: Path) -> None:
    shapes = {"norm": (37,), "experts": (3, 64, 48), "weight": (33, 96), "last": (5,)}
    write(tmp_path / "a.safetensors", shapes, partial(drawn, torch.Generator().manual_seed(0)), part)
    found = load_file(tmp_path / "a.safetensors")
    assert {name: tuple(x.shape) for name, x in found.items()} == shapes
    for name, x in found.items():
        assert x.dtype == torch.bfloat16
        some = x.flatten()[: x.numel() // part] if x.dim() > 1 else x
        assert x.dim() > 1 or (x == 1).all()
        assert some.count_nonzero() == len(some) == x.count_nonzero(), name


def test_numbers_that_are_repeated_differ_from_row_to_row() -> None:
    draw = drawn_once(torch.Generator().manual_seed(0))
    whole, more = draw(PIECE), draw(4096)
    assert len(whole) == PIECE and whole.float().std().item() == pytest.approx(0.02, rel=0.01)
    rows = [whole[:4096], whole[4096:8192], whole[-4096:], more]
    assert not any(torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


def test_a_folder_has_a_model(tmp_path: Path) -> None:
    assert main(["smollm2-135m", str(tmp_path / "model"), "--sparse", "--layers", "1"]) == 0
    places = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(tmp_path / "model" / places["model.embed_tokens.weight"])
    assert set(tensors) == set(places) and tensors["model.embed_tokens.weight"].shape == (49_152, 576)
    assert json.loads((tmp_path / "model/config.json").read_text())["num_hidden_layers"] == 1
