"""Which block sizes are fastest on this GPU: every kernel timed alone, over settings around those of its plan.py.

    python -m tools.kernels.tune OP --context 65536 --seconds 240 -o tune.json

Each setting runs whole calls first: their outputs and states, written over NaN, must be those of the current settings, else it gets
no time. From the best setting the search goes on while time is left. Nothing is written back: put what wins into plan.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.registry import kernels_of, op_names
from still_kernels.tile import Setting, TileTable, changed
from tools.kernels.bench import median_s
from tools.kernels.registry import work_of
from tools.kernels.work import CHECK_LIMIT, Held, Kind, OpWork, relative_error, states_of_step

Launch = Callable[[], None]


@dataclass(frozen=True)
class Trial:
    """One setting. `time_s` is None where it cannot run or its result is wrong; `note` says why."""

    setting: Setting
    time_s: float | None
    error: float
    note: str = ""

    def entry(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None}


@contextlib.contextmanager
def _recording() -> Iterator[list[tuple[str, Launch]]]:
    """Keeps the launches that are made within; workspace starts as NaN, so that nobody reads what an earlier call left."""
    made: list[tuple[str, Launch]] = []

    class Recorder(launcher.Launcher):
        def start(self, name: str, run: Launch) -> None:
            made.append((name, run))
            run()

    def poisoned(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return like.new_full(shape, float("nan") if dtype.is_floating_point else 113, dtype=dtype)

    before = launcher.Launcher, launcher.allocate
    launcher.Launcher, launcher.allocate = Recorder, poisoned  # type: ignore[misc]
    try:
        yield made
    finally:
        launcher.Launcher, launcher.allocate = before  # type: ignore[misc]


class Workload:
    """Calls of one kind: a prefill, or decode steps on several states."""

    def __init__(self, op: OpWork, layer: Any, kind: Kind, dtype: torch.dtype, device: str) -> None:
        self.work = op.work(layer, kind, dtype, device)
        copies = states_of_step(self.work) if kind.tokens == 1 and device == "cuda" else 1
        self.states = [self.work.state() for _ in range(copies)]

    def run(self, table: TileTable) -> tuple[list[tuple[str, Launch]], dict[str, Tensor]]:
        """Launches of one call on each state, and the results of the first."""
        results: dict[str, Tensor] = {}
        with _recording() as made:
            for given in self.states:
                held = isinstance(given, Held)  # which no call writes
                state = given if held else type(given)(**{n: t.clone() for n, t in given.tensors().items()})
                output = torch.full_like(self.work.output, float("nan"))
                self.work.launch(state, output, table)
                kept = {} if held else {n: t.clone() for n, t in state.tensors().items()}
                results = results or {"output": output.clone(), **kept}
        return made, results


def time_launches(launches: Sequence[Launch], device: str) -> float:
    """Seconds of all launches together: replays of a CUDA graph, or the clock in the interpreter."""
    if device != "cuda":
        begin = time.perf_counter()
        for run in launches:
            run()
        return time.perf_counter() - begin
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in launches:
            run()
    return median_s(graph.replay, 10)


class Tuner:
    """Trials of one kernel of the op `name`, in a call of the kind that launches it."""

    def __init__(self, name: str, layer: Any, kernel: str, context: int, dtype: torch.dtype, device: str) -> None:
        self.op, self.functions = work_of(name), kernels_of(name).functions()
        op, self.layer, self.kernel, self.device = self.op, layer, kernel, device
        self.table = op.table(layer, torch.device(device), dtype == torch.float32)
        self.work = Workload(op, layer, op.kind_of(kernel, context), dtype, device)
        self.arch = launcher.arch_of(torch.device(device))
        self.limit = CHECK_LIMIT[dtype]
        self.made, self.expected = self.work.run(self.table)

    @property
    def _is_kernel(self) -> bool:
        return self.kernel in self.functions

    def trial(self, setting: Setting) -> Trial:
        """Run, check and time one setting."""
        from triton.runtime.errors import OutOfResources, PTXASError, TritonError

        table = changed(self.table, self.kernel, setting)
        note = self.op.misfit(table, self.layer, self.arch)
        if note:
            return Trial(setting, None, 0.0, note)
        try:
            made, results = self.work.run(table)
        except OutOfResources as failure:
            return Trial(setting, None, 0.0, f"needs {failure.required} of {failure.name}, there are {failure.limit}")
        except (PTXASError, TritonError, RuntimeError) as failure:
            if "CUDA" in str(failure):
                raise
            return Trial(setting, None, 0.0, f"does not compile: {str(failure).strip().splitlines()[0]}")
        error = max(
            (relative_error(got, wanted) for got, wanted in self._pairs(results) if wanted.double().norm() > 0),
            default=0.0,
        )
        if not error <= self.limit:
            return Trial(setting, None, error, "WRONG RESULT")
        names = (self.kernel, self.op.instead.get(self.kernel))
        mine = [run for name, run in made if name in names or not self._is_kernel]  # or the whole call
        return Trial(setting, time_launches(mine, self.device) / len(self.work.states), error)

    def _pairs(self, results: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for name, got in results.items():
            wanted = self.expected[name]
            kept = wanted.isfinite()  # position 0 has an infinite score
            yield torch.where(kept, got, 0), torch.where(kept, wanted, 0)

    def compile_ahead(self, settings: Sequence[Setting]) -> None:
        """Compile the kernel for all settings at once, on every core; failures show when the setting is tried."""
        from triton.runtime import _async_compile

        if self.device != "cuda" or not self._is_kernel:
            return
        kernel = self.functions[self.kernel]
        run: Any = next((run for name, run in self.made if name == self.kernel), None)
        if run is None:  # another one runs in its place
            return
        arguments = {name: value for name, value in run.keywords.items() if name in kernel.arg_names}
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, _async_compile.AsyncCompileMode(pool, ignore_errors=True):
                for setting in settings:
                    table = changed(self.table, self.kernel, setting)
                    if not self.op.misfit(table, self.layer, self.arch):
                        tile = table.kernels()[self.kernel]
                        kernel.warmup(grid=(1, 1, 1), **arguments | tile.constants, **tile.options())
        except Exception as failure:  # a private interface of Triton, and only a matter of time
            _async_compile.active_mode.set(None)
            print(f"{self.kernel}: settings compile one by one ({failure}).", file=sys.stderr)

    def search(self, seconds: float) -> list[Trial]:
        """The current setting, then moves from it, then moves from the best while one is found and time is left."""
        end = time.monotonic() + seconds
        best = self.trial({})
        trials, tried = [best], {self._key({})}
        while True:
            settings = []
            for move in self.op.moves[self.kernel]:
                setting = self._known({**best.setting, **move})
                if setting is not None and self._key(setting) not in tried:
                    tried.add(self._key(setting))
                    settings.append(setting)
            if time.monotonic() < end:
                self.compile_ahead(settings)
            before = best
            for setting in settings:
                if time.monotonic() >= end:
                    trials.append(Trial(setting, None, 0.0, "no time left"))
                    continue
                trials.append(self.trial(setting))
                if trials[-1].time_s and best.time_s and trials[-1].time_s < 0.99 * best.time_s:
                    best = trials[-1]
            if best is before or self.device != "cuda" or time.monotonic() >= end:
                return trials

    def _key(self, setting: Setting) -> str:
        return repr(changed(self.table, self.kernel, setting))

    def _known(self, setting: Setting) -> Setting | None:
        """The setting, or None where this kernel has no such constant."""
        with contextlib.suppress(KeyError):
            changed(self.table, self.kernel, setting)
            return setting
        return None


def report(title: str, trials: Sequence[Trial]) -> str:
    """Text table of one kernel, fastest first; settings without a time last, with the reason."""
    base = trials[0].time_s
    lines = [title]
    for trial in sorted(trials, key=lambda t: t.time_s or float("inf")):
        name = ", ".join(f"{k}={v}" for k, v in trial.setting.items()) or "(current)"
        if trial.time_s is None:
            lines.append(f"{'-':>12}{'':16}  {name}: {trial.note}")
        else:
            gain = "" if base is None else f"{trial.time_s / base - 1:+.1%}"
            lines.append(f"{trial.time_s * 1e6:12.1f}{gain:>8}{trial.error:8.0e}  {name}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 0, 1 if a setting gave a wrong result, 2 without a GPU or for a wrong option."""
    import triton

    parser = argparse.ArgumentParser(prog="python -m tools.kernels.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", choices=op_names())
    parser.add_argument("--context", type=int, default=65536, help="tokens of the prefill and behind the decode step")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=N", help="a size of the layer; repeatable")
    parser.add_argument("--layer", help="kind of layer; default: the op's first")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--kernels", help="comma-separated; default: all of the op")
    parser.add_argument("--seconds", type=float, default=240, help="time for all kernels together")
    parser.add_argument("-o", "--output", type=Path, help="write all trials here, as JSON")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not triton.knobs.runtime.interpret:
        print("error: no CUDA device; the kernels are timed on the GPU they run on.", file=sys.stderr)
        return 2
    op = work_of(options.op)
    names = list(op.moves) if options.kernels is None else options.kernels.split(",")
    sizes = dict(pair.partition("=")[::2] for pair in options.set)
    kind = next(iter(op.layers)) if options.layer is None else options.layer
    for flag, given, known in (
        ("--kernels", names, op.moves), ("--set", sizes, op.sizes), ("--layer", [kind], op.layers)
    ):  # fmt: skip
        if unknown := [name for name in given if name not in known]:
            print(f"error: {flag} {','.join(unknown)} is unknown; known: {', '.join(known)}.", file=sys.stderr)
            return 2
    layer = op.layer({**op.sizes, **{name: int(value) for name, value in sizes.items()}}, kind, options.context)
    dtype = getattr(torch, options.dtype)
    end = time.monotonic() + options.seconds
    found: dict[str, list[Trial]] = {}
    for done, name in enumerate(names):
        left = [op.shares.get(other, 1) for other in names[done:]]
        share = (end - time.monotonic()) * left[0] / sum(left)
        found[name] = Tuner(options.op, layer, name, options.context, dtype, device).search(share)
        print(
            report(f"{name}, {options.context} tokens, {options.dtype}: us, against current, error", found[name]),
            flush=True,
        )
    if options.output:
        kernels = {name: [trial.entry() for trial in trials] for name, trials in found.items()}
        where = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
        head = {
            "device": where,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "options": vars(options) | {"output": None},
        }
        options.output.write_text(json.dumps({**head, "kernels": kernels}, indent=1) + "\n")
    return 1 if any(trial.note == "WRONG RESULT" for trials in found.values() for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
