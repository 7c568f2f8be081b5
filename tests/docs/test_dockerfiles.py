"""The Dockerfiles name extras, versions and files that there are. Building them needs Docker and base images."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FILES = sorted(ROOT.glob("docker/*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def steps(path: Path) -> str:
    """The instructions, without comments, each on a line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_exist(path: Path) -> None:
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', steps(path))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_versions_are_the_constraints(path: Path) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    for name, version in re.findall(r" ([\w-]+)==([\w.+]+)", steps(path)):
        assert pinned[name] == version, f"{path.name} installs {name} {version}, constraints.txt has {pinned[name]}"


def test_python_is_one_that_tests_ran_on() -> None:
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)", steps(ROOT / "docker/cpu.Dockerfile"), re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_nothing_that_is_installed_is_left_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"}
    assert not needed & set(ignored) and not {"still_export", "kernels", "graphs", "plugins"} & set(ignored)
