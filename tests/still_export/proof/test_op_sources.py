"""Which code computes an op: words change nothing, a kernel its own op, a shared kernel the ops that launch it."""

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from still_export.proof import op_sources
from still_export.proof.op_sources import op_digest
from still_graphs.ops import OPS

CODE = (".py", ".cpp", ".cu", ".h")
DEVICES: tuple[op_sources.Device, ...] = ("cpu", "cuda", "torch")
Edit = Callable[[str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edit]:
    """Replaces a pattern in the first file below a folder of still_kernels, or of C++, that has it; returns by op the devices for which
    its code changed."""
    tmp_path = tmp_path_factory.mktemp("sources")
    kernels, native = tmp_path / "still_kernels", tmp_path / "plugins"
    real = op_sources._modules.__wrapped__
    places = {"still_kernels": kernels, "plugins": native}
    skipped = shutil.ignore_patterns("__pycache__")
    place = real("still_kernels")["still_kernels"].parent
    shutil.copytree(place, kernels, ignore=skipped)
    shutil.copytree(op_sources.SOURCE, native, ignore=skipped)

    others = {"still_graphs": real("still_graphs")}
    copied = {name: kernels.parent / path.relative_to(place.parent) for name, path in real("still_kernels").items()}

    def modules(package: str) -> dict[str, Path]:
        if package != "still_kernels":
            return others[package]
        return copied

    def digests() -> dict[str, dict[str, str | None]]:
        return {name: {device: op_digest(name, device) for device in DEVICES} for name in OPS}

    def replace(folder: str, pattern: str, by: str) -> dict[str, str]:
        place, _, inner = folder.partition("/")
        found = places[place] / inner
        files = [found] if found.is_file() else [p for p in sorted(found.rglob("*.*")) if p.suffix in CODE]
        path, text = next((p, t) for p in files if re.search(pattern, t := p.read_text(encoding="utf-8")))
        path.write_text(re.sub(pattern, by, text, count=1), encoding="utf-8")
        after = digests()
        path.write_text(text, encoding="utf-8")
        changed = {name: " ".join(d for d in DEVICES if after[name][d] != before[name][d]) for name in OPS}
        return {name: devices for name, devices in changed.items() if devices}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_sources, "SOURCE", native)
        patch.setattr(op_sources, "_modules", modules)
        before = digests()
        yield replace


@pytest.mark.slow
def test_words_change_nothing_and_a_kernel_its_own_op(edit: Edit) -> None:
    in_kernel = r"(@triton\.jit\n(?:.*\n)*?    )(\w+ = )"
    assert edit("still_kernels/causal_conv", r'\A"""', '"""More words. ') == {}
    assert edit("still_kernels/causal_conv", r"\n\n\n", "\n\n\n# A comment.\n") == {}
    assert edit("still_kernels/causal_conv/kernels.py", in_kernel, r"\1\2 1 + ") == {"CausalConv": "cuda torch"}
    assert edit("still_kernels/causal_conv/call.py", r"\n    return ", "\n    return 1 + ") == {"CausalConv": "torch"}
    assert edit("still_kernels/causal_conv/body.py", r"\n    return ", "\n    return 1 + ") == {
        "CausalConv": "cpu cuda torch"
    }
    assert "Attention" in edit("still_kernels/attention", in_kernel, r"\1\2 1 + ").keys() - {
        "CausalConv",
        "HybridAttention",
    }
    assert len(edit("still_kernels/common", in_kernel, r"\1\2 1 + ")) > 1


@pytest.mark.slow
def test_code_of_cpus_counts_by_what_it_includes(edit: Edit) -> None:
    folder = "still_kernels/causal_conv/cpu"
    assert edit(folder, r"(?m)^namespace", "// a comment\nnamespace") == {}
    assert edit(folder, r"(?m)^(namespace \w+)", r"\1_more") == {"CausalConv": "cpu"}
    assert len(edit("plugins/cpu/common/elements.h", r"(?m)^namespace", "int more;\nnamespace")) > 1


def test_fields_that_a_newer_python_adds_count_only_if_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def f(x):\n    return x\n"
    before = op_sources._statements.__wrapped__(text)
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "added"))
    monkeypatch.setattr(ast.FunctionDef, "added", [], raising=False)
    assert op_sources._statements.__wrapped__(text) == before
    monkeypatch.setattr(ast.FunctionDef, "added", ["T"])
    assert op_sources._statements.__wrapped__(text) != before


def test_an_op_that_is_gone_has_no_code() -> None:
    assert op_digest("NoSuchOp", "cpu") is None
