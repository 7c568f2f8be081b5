"""A check of compiled kernels is left out over equal inputs alone: whatever they follow from changes the hash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from still_kernels.registry import kernels_of
from tests import compiled
from tests.still_kernels import interpreted

KERNELS = kernels_of("GreedyToken")


def lines(variant: Any, arch: int = 90) -> list[str]:
    return compiled.inputs("GreedyToken", variant, arch)


def test_inputs_are_all_that_code_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = KERNELS.variant()
    right = lines(variant)
    assert lines(KERNELS.variant()) == right and len(right) == len(KERNELS.functions())
    assert lines(KERNELS.variant("float32")) != right
    assert lines(variant, 80) != right
    build = KERNELS.build(variant, 90)
    for tiles in (
        {name: replace(tile, num_warps=2 * tile.num_warps) for name, tile in build.tiles.items()},
        {name: replace(tile, max_registers=40) for name, tile in build.tiles.items()},
        {
            name: replace(tile, constants={n: 2 * x for n, x in tile.constants.items()})
            for name, tile in build.tiles.items()
        },
    ):
        other = replace(KERNELS, build=lambda *_, tiles=tiles: replace(build, tiles=tiles))
        monkeypatch.setattr("still_kernels.registry.kernels_of", lambda op, other=other: other)
        assert lines(variant) != right, tiles


def test_a_line_of_a_kernel_or_of_what_it_calls_is_an_input(tmp_path: Path) -> None:
    """Triton's own hash of a function has the functions that it calls."""
    source = "import triton\n\n\n@triton.jit\ndef twice(x):\n    return x * 2\n\n\n@triton.jit\ndef kernel(p_x):\n    twice(1)\n"
    found = set()
    for number, text in enumerate(
        (source, source, source.replace("x * 2", "x * 3"), source.replace("twice(1)", "twice(2)"))
    ):
        path = tmp_path / f"{number}.py"
        path.write_text(text)
        names: dict[str, object] = {"__name__": "kernels"}
        exec(compile(text, str(path), "exec"), names)
        found.add(compiled.given(names["kernel"], {}, {}))
    assert len(found) == 3


def test_a_hash_does_not_follow_from_what_was_hashed_before(tmp_path: Path) -> None:
    """Triton's own of a kernel does, whose callee has a constant: it tells whether the callee's was asked for."""
    text = "import triton\nimport triton.language as tl\n\nN = tl.constexpr(2)\n\n\n@triton.jit\ndef twice(x):\n    return x * N\n\n\n"
    text += "@triton.jit\ndef kernel(p_x):\n    twice(1)\n"
    path = tmp_path / "kernels.py"
    path.write_text(text)

    def functions() -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "kernels"}
        exec(compile(text, str(path), "exec"), names)
        return names

    first, second = functions(), functions()
    assert second["twice"].cache_key and first["kernel"].cache_key and second["kernel"].cache_key
    assert compiled.hash_of_function(first["kernel"]) == compiled.hash_of_function(second["kernel"])


def test_a_run_is_of_its_code_and_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "ROOT", tmp_path)

    def hash_of(text: str, names: tuple[str, ...] = ("a case",), file: str = "a.py") -> str:
        (tmp_path / "a.py").write_text(text)
        interpreted.code_of.cache_clear()
        return interpreted.hash_of([file], names)

    right = hash_of('"""A kernel."""\nN = 2\n"""Of something."""\n')
    assert hash_of('"""Another sentence."""\n\nN = 2  # why\n') == right
    assert len({right, hash_of("N = 3"), hash_of("N = 2", ("a case", "another"))}) == 3
    assert hash_of("N = 2", file="gone.py") == ""


def test_files_beside_are_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.setattr(compiled, "sources", compiled.sources.__wrapped__)
    (tmp_path / "a").mkdir()
    for name, text in (("a/one.py", "1"), ("a/two.cpp", "2"), ("three.py", "3"), ("four.md", "4")):
        (tmp_path / name).write_text(text)
    before = compiled.sources("a", "*.py")
    assert [line.split()[0] for line in before] == ["a/one.py", "a/two.cpp", "three.py"]
    (tmp_path / "a/two.cpp").write_text("3")
    assert compiled.sources("a", "*.py") != before


def test_the_compiler_and_the_check_are_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_code.py"
    test.write_text("assert True")
    right = compiled.hash_of(["a kernel"], test)
    assert compiled.hash_of(["a kernel"], test) == right != compiled.hash_of(["another"], test)
    with monkeypatch.context() as other:
        other.setattr(compiled, "compiler", lambda: "another assembler")
        assert compiled.hash_of(["a kernel"], test) != right
    with monkeypatch.context() as other:
        other.setattr(compiled, "CHECKS", compiled.CHECKS[1:])
        assert compiled.hash_of(["a kernel"], test) != right
    test.write_text("assert not False")
    assert compiled.hash_of(["a kernel"], test) != right


def test_what_was_not_recorded_is_compiled(
    compiled_before: compiled.Before, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    asked = ["of this test"]
    assert not compiled_before(asked)
    test = "tests/test_compiled.py::test_what_was_not_recorded_is_compiled"
    monkeypatch.setattr(compiled, "recorded", lambda: {test: compiled.hash_of(asked, Path(__file__))})
    assert compiled_before(asked) and not compiled_before(["of another"])
    del request.node.compiled  # nothing to record


def test_records_are_of_tests_that_are_there() -> None:
    files = {name.partition("::")[0] for name in compiled.recorded()}
    assert files and all((compiled.ROOT / file).exists() for file in files)
