#!/usr/bin/env python3
"""Compare a TensorRT engine with PyTorch across two machines: one has PyTorch, the other the GPU and little else.

  python tools/check_engine.py record MODEL --package PACKAGE -o calls.npz    # with PyTorch: runs float32 and float16
  python tools/check_engine.py check PACKAGE calls.npz                        # with the GPU: tensorrt, numpy and the driver

`check` prints, per case, the mean error of logits and states beside that of PyTorch's own float16 run, and fails where it is more than
FACTOR times as large, where a replayed step differs from a single one, or where room that grew differs from room that was there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

FACTOR = 3.0
FLOOR = 1e-4
STEPS = 256
PROMPT = 150
LENGTHS = (1, 63, 64, 65, 129, 512)
RAGGED = (193, 0, 1, 65)


def record(model: str, package: Path, output: Path) -> None:
    """Run PyTorch in float32 and float16 over all cases and save the calls with both answers."""
    from dataclasses import replace

    from still_export.onnx_package import ExportOptions, load_source
    from still_export.package import open_package
    from still_export.runners.torch import TorchRunner, next_feed

    manifest = open_package(package, check_hashes=False).manifest
    options = replace(ExportOptions.from_manifest(manifest), model=model)
    runs = {d: TorchRunner(load_source(replace(options, dtype=d))) for d in ("float32", "float16")}
    random = np.random.default_rng(0)
    ids = random.integers(0, manifest["model"]["vocab_size"], (1, max(LENGTHS)))
    saved: dict[str, np.ndarray] = {}

    def start(runner: TorchRunner, tokens: np.ndarray, room: int, counts: np.ndarray | None = None) -> Any:
        return {**next_feed({}, tokens, counts), **runner.empty_feed(tokens.shape[0], room)}

    def keep(case: str, dtype: str, outputs: dict[str, np.ndarray]) -> None:
        for name, array in outputs.items():
            if name != "present_length":
                small = array.astype(np.float16) if "score" not in name else array
                saved[f"{case}|{dtype}|{name}"] = small

    for length in LENGTHS:
        saved[f"prefill {length}|tokens"] = ids[:, :length]
        for dtype, runner in runs.items():
            keep(f"prefill {length}", dtype, runner.infer(start(runner, ids[:, :length], length)))
    tokens = np.tile(ids[:, : max(RAGGED)], (len(RAGGED), 1))
    saved["ragged|tokens"], saved["ragged|counts"] = tokens, np.array(RAGGED)
    for dtype, runner in runs.items():
        keep("ragged", dtype, runner.infer(start(runner, tokens, max(RAGGED), np.array(RAGGED))))
    steps: list[np.ndarray] = []
    saved["decode|prompt"] = ids[:, :PROMPT]
    for dtype, runner in runs.items():  # float32 chooses the tokens, float16 follows
        outputs = runner.infer(start(runner, ids[:, :PROMPT], PROMPT + STEPS))
        logits = [outputs["logits"][:, -1]]
        for step in range(STEPS):
            if dtype == "float32":
                steps.append(logits[-1].argmax(-1)[:, None])
            outputs = runner.infer(next_feed(outputs, steps[step]))
            logits.append(outputs["logits"][:, -1])
        keep("decode", dtype, {**outputs, "logits": np.concatenate(logits)[::8]})
        saved[f"decode|{dtype}|best"] = np.concatenate(logits).argmax(-1)
    saved["decode|tokens"] = np.concatenate(steps, axis=1)
    np.savez_compressed(output, **saved)


class Checker:
    """Compares outputs with the saved ones; remembers what failed."""

    def __init__(self, saved: Any) -> None:
        self.saved = saved
        self.failed: list[str] = []

    def compare(self, case: str, logits: np.ndarray, states: dict[str, np.ndarray]) -> None:
        """Print one line for the case: per kind of output the mean error, and PyTorch float16's own."""
        kinds: dict[str, list[tuple[float, float]]] = {}
        for name, array in {"logits": logits, **{f"present_{k}": v for k, v in states.items()}}.items():
            wanted = self.saved[f"{case}|float32|{name}"].astype(np.float64)
            if not wanted.size:
                continue
            common = tuple(slice(0, n) for n in wanted.shape)
            half = self.saved[f"{case}|float16|{name}"].astype(np.float64)
            errors = [_error(np.asarray(x, np.float64)[common], wanted) for x in (array, half)]
            kinds.setdefault(name.split(".")[0].removeprefix("present_"), []).append((errors[0], errors[1]))
        parts = []
        for kind, pairs in kinds.items():
            mine, theirs = np.mean(pairs, axis=0)
            parts.append(f"{kind} {mine:.1e} ({theirs:.1e})")
            self.judge(mine <= FACTOR * theirs + FLOOR, f"{case}: {parts[-1]}")
        print(f"{case}: " + ", ".join(parts), flush=True)

    def judge(self, good: bool, what: str) -> None:
        """Remember a failure."""
        if not good:
            self.failed.append(what)


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    same = got == wanted  # infinities too
    return float(np.where(same, 0, np.abs(np.where(same, 0, got) - np.where(same, 0, wanted))).mean())


def check(package: Path, calls: Path, plugin: Path | None) -> int:
    """Run the engine over the saved calls; exit code."""
    sys.path.insert(0, str(package.resolve()))
    from run_trt import TrtModel  # type: ignore[import-not-found]

    saved = np.load(calls)
    checker, model = Checker(saved), TrtModel(package, plugin)
    for length in LENGTHS:
        model.start()
        checker.compare(f"prefill {length}", model.feed(saved[f"prefill {length}|tokens"]), model.state_arrays())
    longest = f"prefill {max(LENGTHS)}"
    model.start()
    for piece in np.split(saved[f"{longest}|tokens"], [1, 64, 65, 130, 400], axis=1):
        logits = model.feed(piece)
    print("in pieces, ", end="")
    checker.compare(longest, logits, model.state_arrays())
    model.start(len(RAGGED))
    logits = model.feed(saved["ragged|tokens"], saved["ragged|counts"])
    logits[saved["ragged|counts"] == 0] = saved["ragged|float32|logits"][saved["ragged|counts"] == 0]
    checker.compare("ragged", logits, model.state_arrays())

    model.start(tokens=PROMPT + STEPS)
    rows = [model.feed(saved["decode|prompt"])[0, -1]]
    rows += [model.feed(np.array([[token]]))[0, -1] for token in saved["decode|tokens"][0]]
    checker.compare("decode", np.array(rows)[::8], model.state_arrays())
    best, wanted, half = (
        x.ravel() for x in (np.argmax(rows, -1), saved["decode|float32|best"], saved["decode|float16|best"])
    )
    agree, theirs = float((best == wanted).mean()), float((half == wanted).mean())
    print(f"decode: best token agrees in {agree:.4f} ({theirs:.4f})")
    checker.judge(1 - agree <= FACTOR * (1 - theirs) + 0.02, f"decode: top-1 agreement {agree}")

    def prompted(room: int) -> int:
        model.start(tokens=room)
        return int(model.feed(saved["decode|prompt"])[0, -1].argmax())

    first = prompted(PROMPT + STEPS)
    replayed = [int(t[0]) for t in model.greedy(np.array([first]), STEPS)]
    kept = model.state_arrays()
    token, single = prompted(PROMPT + STEPS), []
    for _ in range(STEPS):
        token = int(model.feed(np.array([[token]]))[0, -1].argmax())
        single.append(token)
    same = replayed == single and _equal(kept, model.state_arrays())
    print(f"replayed steps equal single steps: {same}")
    checker.judge(same, "replayed steps differ from single steps")
    prompted(0)
    grown = model.state_arrays()
    prompted(int(model.manifest["capacity"]["capacity_tokens"]))
    same = _equal(grown, model.state_arrays())
    print(f"room that grew equals room that was there: {same}")
    checker.judge(same, "growing the state changed it")
    print("PASSED" if not checker.failed else "FAILED:\n  " + "\n  ".join(checker.failed))
    return int(bool(checker.failed))


def _equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Equal bit for bit, over the salient slots that both have."""
    return all(np.array_equal(x, b[n][tuple(slice(0, s) for s in x.shape)], equal_nan=True) for n, x in a.items())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("record")
    verb.add_argument("model")
    verb.add_argument("--package", type=Path, required=True)
    verb.add_argument("-o", "--output", type=Path, required=True)
    verb = verbs.add_parser("check")
    verb.add_argument("package", type=Path)
    verb.add_argument("calls", type=Path)
    verb.add_argument("--plugin", type=Path)
    options = parser.parse_args()
    if options.verb == "check":
        return check(options.package, options.calls, options.plugin)
    record(options.model, options.package, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
