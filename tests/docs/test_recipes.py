"""Recipes that pages tell readers to run can be read."""

from pathlib import Path

import pytest

from still_export.linearization.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted([*ROOT.glob("docs/**/*.yaml"), *ROOT.glob("assets/**/recipe*.yaml")])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_is_read(path: Path) -> None:
    assert read_recipe(path, {"chat_file": "chats.jsonl"}).mixer
