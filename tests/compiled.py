"""Checks of what a compiler makes: they hold until what it is given, the compiler, or the check changes. No GPU.

Machine code follows from a kernel's source with what it calls, types, constants, options, architecture, and the compiler. Compiling the
kernels that CI looks at takes six minutes of a processor, and nearly always gives what it gave before. tests/compiled.json has of each
check that passed a hash of all these and of the files that check; an equal one passes, any other compiles, and a run says how many did.

    python -m pytest --write-compiled tests/still_kernels    record what passed
    python -m pytest --compile tests/still_kernels           compile everything, as `tools/test.sh --all` does

tests/still_kernels/interpreted.py has the same of what kernels compute in Triton's interpreter, and follows the same two options.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Before = Callable[[list[str]], bool]
"""Of what a test compiles, one line a kernel: whether it passed over equal lines."""
ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
CHECKS = (
    "tests/machine_code.py",
    "tests/descriptors.py",
    "kernels/still_kernels/aot.py",
    "kernels/still_kernels/common/cubin.py",
)
"""What makes or reads machine code beside the file of the test."""


def inputs(op: str, variant: Any, arch: int, only: str = "") -> list[str]:
    """All that what `still_kernels.aot.compile_variant` compiles follows from, a line a kernel; arguments as there."""
    from still_kernels import aot
    from still_kernels.registry import kernels_of

    kernels = kernels_of(op)
    functions, build = kernels.functions(), kernels.build(variant, arch)
    return [
        f"{name} {given(functions[name], *aot.signature_of(functions[name], kernels, variant, tile, build))} {tile} {arch}"
        f" {dict(build.plan_constants)}"
        for name, tile in build.tiles.items()
        if only in ("", name)
    ]


def given(function: Any, signature: dict[str, str], values: dict[str, Any]) -> str:
    """A function with all that it calls, and what it is compiled for."""
    from still_kernels.common.cuda_function import CudaFunction, nvrtc

    if isinstance(function, CudaFunction):
        source = hashlib.sha256(function.source.read_bytes()).hexdigest() + str(nvrtc()[1])
    else:
        source = hash_of_function(function)
    return f"{source} {signature} {values}"


_hashes: dict[int, tuple[str, Any]] = {}
"""By id of functions, which are kept, so that no id is given again."""


def hash_of_function(function: Any) -> str:
    """Triton's hash of a function with all that it calls.

    Triton 3.7 leaves the constants of a callee out if nobody hashed the callee before: what a hash is followed from what the process had
    compiled. Here callees come first.
    """
    from triton.runtime.jit import DependenciesFinder

    class Callees(DependenciesFinder):
        def _update_hash(self, callee: Any) -> None:
            hash_of_function(getattr(callee, "__func__", callee))

    if id(function) not in _hashes:
        _hashes[id(function)] = "", function  # it may call itself
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        Callees(function._fn_name, function.__globals__, nonlocals, function.src).visit(function.parse())
        function.hash = None
        _hashes[id(function)] = function.cache_key, function
    return _hashes[id(function)][0]


COMPILES_HYBRID = tuple(f"kernels/still_kernels/{part}" for part in ("*.py", "common", "plan", "hybrid_attention"))
"""What compiles and launches the kernels of still::HybridAttention, and these."""


@cache
def sources(*places: str) -> list[str]:
    """A line for each file of this project that a pattern names, or that is in such a folder: what else a check follows from."""
    roots = [path for place in places for path in ROOT.glob(place)]
    files = {path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))}
    found = sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)
    return [f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in found]


@cache
def compiler() -> str:
    """Triton's own sources and library, and its assemblers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    backends = [make_backend(GPUTarget("cuda", arch, 32)).hash() for arch in (90, 100)]
    return " ".join([triton_key(), *backends])


@cache
def recorded() -> dict[str, str]:
    """A hash by test."""
    found: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def hash_of(lines: list[str], test: Path) -> str:
    """Of what is compiled, of the compiler, and of the files that check."""
    digest = hashlib.sha256("\n".join([compiler(), *lines]).encode())
    for path in (test, *(ROOT / name for name in CHECKS)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of what checks compiled code."""
    parser.addoption("--compile", action="store_true", help=f"compile and interpret also what passed by {FILE.name}")
    parser.addoption("--write-compiled", action="store_true", help=f"record in {FILE.name} what passed")


@dataclass
class Interpreted:
    """What `run_cases` of tests/still_kernels/interpreted.py is to do in this process, and what it has done since the last report."""

    anew: bool = False
    writes: bool = False
    equal: int = 0
    ran: int = 0


INTERPRETED = Interpreted()


class Compiled:
    """Counts the checks, and records those that passed; workers send what they know with the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.writes = config.getoption("write_compiled") and not hasattr(config, "workerinput")
        self.equal, self.anew = 0, dict[str, str]()
        self.interpreted = [0, 0]
        INTERPRETED.anew, INTERPRETED.writes = config.getoption("compile"), config.getoption("write_compiled")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """With the hash of what the test asked for, and whether it was equal."""
        report = yield
        if call.when == "call":
            report.compiled = getattr(item, "compiled", None)
        report.interpreted = (INTERPRETED.equal, INTERPRETED.ran)
        INTERPRETED.equal = INTERPRETED.ran = 0
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of any process."""
        now, equal = getattr(report, "compiled", None) or ("", True)
        self.equal += bool(now and equal)
        self.interpreted = [
            a + b for a, b in zip(self.interpreted, getattr(report, "interpreted", (0, 0)), strict=True)
        ]
        if not equal and report.passed:
            self.anew[report.nodeid] = now

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """How many compiled nothing; record what passed."""
        if self.equal or self.anew:
            terminalreporter.line(f"checks of kernels: {self.equal} got what passed before, {len(self.anew)} compiled")
        if any(self.interpreted):
            equal, ran = self.interpreted
            terminalreporter.line(f"runs in the interpreter: {equal} of kernels that ran before, {ran} ran")
        if self.writes:
            every = {name: each for name, each in recorded().items() if (ROOT / name.partition("::")[0]).exists()}
            text = json.dumps(dict(sorted({**every, **self.anew}.items())), indent=0)
            FILE.write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def compiled_before(request: pytest.FixtureRequest) -> Before:
    """Whether this test passed over equal inputs of the compiler: it may return then."""

    def same(lines: list[str]) -> bool:
        now = hash_of(lines, request.node.path)
        equal = recorded().get(request.node.nodeid) == now and not request.config.getoption("compile")
        request.node.compiled = (now, equal)
        return equal

    return same
