"""The Dockerfiles name extras, versions and files that there are. Building them needs Docker and base images."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT

FILES = sorted(ROOT.glob("docker/*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def steps(path: Path) -> str:
    """The instructions, without comments, each on a line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


def extras_of(path: Path) -> set[str]:
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', steps(path))
    return set(extras.split(","))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_exist(path: Path) -> None:
    assert extras_of(path) <= set(PROJECT["optional-dependencies"])


def test_what_compose_runs_is_installed() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        installed = extras_of(ROOT / service["build"]["dockerfile"])
        while wider := {e for name in installed for e in extras_in(PROJECT["optional-dependencies"][name])} - installed:
            installed |= wider
        verb = service["command"][0]
        assert verb not in PROJECT["optional-dependencies"] or verb in installed


def extras_in(requirements: list[str]) -> set[str]:
    """Extras of this project among requirements."""
    return {e for line in requirements for e in re.sub(r"^still-export\[(.*)\]$|.*", r"\1", line).split(",") if e}


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
