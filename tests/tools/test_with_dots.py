"""A command that says nothing for long."""

import subprocess
import sys

from tests.docs.pages import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tools/with_dots.py", *words], capture_output=True, text=True)


def test_a_silent_command_has_dots_its_time_and_its_code() -> None:
    done = run("installing", "sh", "-c", "echo out; sleep 2.2")
    assert done.returncode == 0 and done.stdout == "out\n" and done.stderr == "installing . 2 s\n"
    done = run("trying", "sh", "-c", "echo lost >&2; exit 3")
    assert done.returncode == 3 and done.stderr == "trying \nlost\n failed\n"
    done = run("--else", "not here", "trying", "sh", "-c", "echo lost >&2; exit 3")
    assert done.returncode == 3 and done.stderr == "trying  not here\n"


def test_what_installs_or_fetches_has_dots() -> None:
    for name in ("env.sh", "demo.sh"):
        for line in (ROOT / "tools" / name).read_text(encoding="utf-8").splitlines():
            assert not ("pip install" in line or "-m venv" in line) or "with_dots.py" in line, line


def test_the_demo_builds_kernels_before_torch_is_there() -> None:
    """Its command, where kernels are not to be built, with the packages that it waits for alone."""
    demo = (ROOT / "tools/demo.sh").read_text(encoding="utf-8")
    build = next(line for line in demo.splitlines() if line.startswith("build=")).removeprefix("build=").strip("'")
    heavy = "; import sys; assert not {'torch', 'numpy', 'pydantic', 'onnx'} & set(sys.modules)"
    places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'graphs'}", "STILL_BUILD_KERNELS": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", build + heavy], env=places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "$build" in demo and "build_library()" in build
