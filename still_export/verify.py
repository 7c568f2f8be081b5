"""The proof of a package: PyTorch and the target on the same inputs, compared by polygraphy on every output."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import UnsupportedError
from still_export.package import Package
from still_export.runners.torch import Arrays, TorchRunner, next_feed
from still_export.selections import SelectionCheck, Selections
from still_export.targets import Infer, OrtTarget, TrtTarget

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 4097)
DECODE_STEPS = 72
"""More than a chunk, so that a promotion happens between plain steps."""

ATTEMPTS = 5
"""Prompts tried where a near tie made the runtimes select different tokens; see `Verifier._settled`."""


@dataclass(frozen=True)
class Tolerance:
    """Bounds of polygraphy's comparison: an output fails where its absolute and its relative error exceed them.

    `logits` is the absolute bound of the logits, `absolute` of all other outputs. `statistic` is polygraphy's check_error_stat.
    `tie` is the lead of a selected token over the first rejected one (in logits) below which rounding may swap them.
    """

    logits: float
    absolute: float
    relative: float
    statistic: str
    tie: float


TOLERANCES = {
    # PyTorch's own float32 logits of SmolLM2-135M (magnitude 25) are off its float64 ones by 4e-5 in the median of 120 decode steps
    # and by up to 5.5e-3: a few tokens amplify rounding, in scores and keys too. Two float32 runtimes may differ by twice that.
    "float32": Tolerance(5e-2, 2e-2, 1e-3, "elemwise", 1e-3),
    # Near ties flip selections in half precision, so single elements prove nothing there; see the float32 package for those.
    "float16": Tolerance(5e-2, 5e-2, 5e-2, "median", 5e-2),
}


@dataclass
class Case:
    """One comparison.

    Args:
        name: For the table.
        feeds, expected: Calls with fixed inputs and PyTorch's outputs, saved for polygraphy's own command.
        start, steps: For decode: a prefill feed and the tokens that follow one by one; the target carries its own state.
        step_logits: PyTorch's logits of the prefill and of every step.
    """

    name: str
    feeds: list[Arrays]
    expected: list[Arrays]
    start: Arrays | None = None
    steps: tuple[np.ndarray, ...] = ()
    step_logits: np.ndarray | None = None

    def sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens [B, T] that the last call's rows have seen, and their counts [B]."""
        parts = [f["input_ids"] for f in self.feeds] if self.start is None else [self.start["input_ids"], *self.steps]
        return np.concatenate(parts, axis=1), self.feeds[-1]["new_tokens"] + self.feeds[-1]["past_length"]

    def compare_with(self, infer: Infer) -> list[tuple[Arrays, Arrays]]:
        """Pairs of PyTorch's and the target's outputs."""
        if self.start is None:
            return [(e, infer(feed)) for feed, e in zip(self.feeds, self.expected, strict=True)]
        outputs = infer(self.start)
        logits = [outputs["logits"]]
        for token in self.steps:
            outputs = infer(next_feed(outputs, token))
            logits.append(outputs["logits"])
        assert self.step_logits is not None
        expected = {**self.expected[-1], "logits": self.step_logits}
        return [(expected, {**outputs, "logits": np.concatenate(logits)})]


@dataclass
class OutputReport:
    """Errors of one output over all calls of a case."""

    case: str
    output: str
    max_abs: float
    mean_abs: float
    cosine: float
    passed: bool


@dataclass
class Report:
    """The verdict on a package; `first_diverging_layer` is the lowest one with a failed state."""

    outputs: list[OutputReport]
    top1: float
    selections: Selections
    first_diverging_layer: int | None
    command: str
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "passed": self.passed,
            "top1_agreement": self.top1,
            "selections": vars(self.selections),
            "first_diverging_layer": self.first_diverging_layer,
            "polygraphy": self.command,
            "outputs": [vars(o) for o in self.outputs],
        }


class Verifier:
    """Compares a package, run by its runtime, with the PyTorch model it was exported from.

    Args:
        package: What to verify.
        model: The PyTorch model.
        lengths: Prompt lengths, each prefilled at once; those beyond the capacity are left out.
        decode_steps: Single-token calls after a prefill.
        seed: Of the prompts.
        target: The package's runtime; None = ONNX Runtime.
    """

    def __init__(
        self,
        package: Package,
        model: Any,
        lengths: tuple[int, ...] = LENGTHS,
        decode_steps: int = DECODE_STEPS,
        seed: int = 0,
        target: OrtTarget | TrtTarget | None = None,
    ) -> None:
        info, capacity = package.manifest["model"], package.manifest["capacity"]
        if info["dtype"] not in TOLERANCES:
            raise UnsupportedError(
                f"the package's weights are {info['dtype']}; polygraphy compares NumPy arrays, which have no bfloat16. "
                "Verify a float32 or float16 export of the same model."
            )
        self.package = package
        self.target = target or OrtTarget(package)
        self.reference = TorchRunner(model, info["all_logits"])
        self.tolerance = TOLERANCES[info["dtype"]]
        self.random = np.random.default_rng(seed)
        self.vocabulary = int(info["vocab_size"])
        self.chunk = int(capacity["chunk_size"])
        limit = int(capacity["capacity_tokens"]) if capacity["overflow"] == "error" else 1 << 62
        self.lengths = tuple(n for n in lengths if n <= limit)
        self.longest = max(self.lengths, default=1)
        self.decode_prompt = min(2 * self.chunk + self.chunk // 2, max(1, limit - decode_steps))
        self.decode_steps = min(decode_steps, limit - self.decode_prompt)
        self.check = SelectionCheck(package.manifest, self.reference, self.tolerance.tie)

    @property
    def case_count(self) -> int:
        """Cases that `run` goes through."""
        return len(self.lengths) + 3

    def run(self, folder: Path, progress: Callable[[str], None] = lambda done: None) -> Report:
        """Compare every case, save the calls to `folder` (inputs.json, outputs.json) for polygraphy's own command, and judge.

        Args:
            folder: Made where missing.
            progress: Told each finished case.
        """
        from polygraphy.comparator import IterationResult, RunResults
        from polygraphy.json import save_json
        from polygraphy.logger import G_LOGGER

        selections = Selections()
        judged: list[tuple[Case, list[tuple[Arrays, Arrays]]]] = []
        G_LOGGER.module_severity = G_LOGGER.ERROR
        with self.target.open() as infer:
            for make in self._cases():
                judged.append(self._settled(make, infer, selections))
                progress(judged[-1][0].name)
        folder.mkdir(parents=True, exist_ok=True)
        feeds, expected = self.target.saved(
            [feed for case, _ in judged for feed in case.feeds], [out for case, _ in judged for out in case.expected]
        )
        save_json(feeds, str(folder / "inputs.json"))
        answers = [IterationResult(out, runner_name="pytorch") for out in expected]
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(invalid="ignore"):
            RunResults([("pytorch", answers)]).save(str(folder / "outputs.json"))
        return self._judge(judged, selections, folder)

    def _cases(self) -> Iterator[Callable[[], Case]]:
        for length in self.lengths:
            yield partial(self._prefill_case, length)
        yield self._ragged_case
        yield self._pieces_case
        yield self._decode_case

    def _tokens(self, *shape: int) -> np.ndarray:
        return self.random.integers(0, self.vocabulary, shape, dtype=np.int64)

    def _start(self, tokens: np.ndarray, capacity: int, new_tokens: np.ndarray | None = None) -> Arrays:
        room = max(capacity, self.target.least_capacity)
        return {**next_feed({}, tokens, new_tokens), **self.reference.empty_feed(tokens.shape[0], room)}

    def _prefill_case(self, length: int) -> Case:
        feed = self._start(self._tokens(1, length), length)
        return Case(f"prefill {length}", [feed], [self.reference.infer(feed)])

    def _ragged_case(self) -> Case:
        """Rows of different lengths in one call, one of them empty."""
        longest = min(3 * self.chunk + 1, self.longest)
        counts = np.array([longest, 0, 1, min(longest, self.chunk + 1)], np.int64)
        feed = self._start(self._tokens(4, longest), longest, counts)
        return Case("ragged batch of 4", [feed], [self.reference.infer(feed)])

    def _pieces_case(self) -> Case:
        """Prefill in pieces across chunk boundaries; each call starts from PyTorch's state."""
        sizes = [self.chunk - 1, self.chunk + 1, 2 * self.chunk + 1]
        while sum(sizes) > self.longest and len(sizes) > 1:
            sizes.pop()
        feeds: list[Arrays] = []
        expected: list[Arrays] = []
        for size in sizes:
            tokens = self._tokens(1, max(1, min(size, self.longest)))
            feeds.append(next_feed(expected[-1], tokens) if expected else self._start(tokens, max(sum(sizes), 1)))
            expected.append(self.reference.infer(feeds[-1]))
        return Case("prefill in pieces", feeds, expected)

    def _decode_case(self) -> Case:
        start = self._start(self._tokens(1, self.decode_prompt), self.decode_prompt + self.decode_steps)
        feed, outputs = start, self.reference.infer(start)
        logits = [outputs["logits"][:, -1:]]
        steps = tuple(self._tokens(1, 1) for _ in range(self.decode_steps))
        for token in steps:
            feed = next_feed(outputs, token)
            outputs = self.reference.infer(feed)
            logits.append(outputs["logits"])
        return Case(f"{len(steps)} decode steps", [feed], [outputs], start, steps, np.concatenate(logits))

    def _settled(
        self, make: Callable[[], Case], infer: Infer, total: Selections
    ) -> tuple[Case, list[tuple[Arrays, Arrays]]]:
        """A case on which both runtimes select the same tokens.

        Where two scores differ by less than rounding, either selection is right and everything after it differs; another prompt
        is drawn then. A selection that differs by more than a tie is kept: it is a mismatch.
        """
        for _ in range(ATTEMPTS):
            case = make()
            pairs = case.compare_with(infer)
            found = self.check.compare(pairs, *case.sequence())
            total.add(found)
            if not found.near_ties or found.wrong or self.tolerance.statistic != "elemwise":
                break
        return case, pairs

    def _judge(
        self, judged: list[tuple[Case, list[tuple[Arrays, Arrays]]]], selections: Selections, folder: Path
    ) -> Report:
        reports: list[OutputReport] = []
        agree: list[np.ndarray] = []
        for case, pairs in judged:
            verdicts = self._verdicts(pairs)
            agree += [(e["logits"].argmax(-1) == a["logits"].argmax(-1)).ravel() for e, a in pairs]
            for output in pairs[0][0]:
                expected, actual = (
                    np.concatenate([side[output].astype(np.float64).ravel() for side in sides])
                    for sides in zip(*pairs, strict=True)
                )
                same = expected == actual  # infinities too: position 0 has an infinite score
                error = np.where(same, 0, np.abs(expected - np.where(same, 0, actual)))
                reports.append(
                    OutputReport(
                        case.name,
                        output,
                        float(error.max(initial=0)),
                        float(error.mean()) if error.size else 0.0,
                        _cosine(expected, actual),
                        verdicts.get(output, True) and not np.isnan(error).any(),
                    )
                )
        failed = {int(r.output.rsplit(".", 1)[1]) for r in reports if not r.passed and "." in r.output}
        command = self.target.command()
        command += ["--load-inputs", str(folder / "inputs.json"), "--load-outputs", str(folder / "outputs.json")]
        command += [
            "--atol",
            str(self.tolerance.absolute),
            f"logits:{self.tolerance.logits}",
            "--rtol",
            str(self.tolerance.relative),
        ]
        command += ["--check-error-stat", self.tolerance.statistic, "--infinities-compare-equal"]
        passed = all(r.passed for r in reports) and not selections.wrong
        top1 = float(np.concatenate(agree).mean())
        return Report(reports, top1, selections, min(failed, default=None), shlex.join(command), passed)

    def _verdicts(self, pairs: list[tuple[Arrays, Arrays]]) -> dict[str, bool]:
        """Polygraphy's verdict on each output over all calls; outputs without elements are left out."""
        from polygraphy.comparator import Comparator, IterationResult, RunResults, SimpleCompareFunc
        from polygraphy.logger import G_LOGGER

        compare = SimpleCompareFunc(
            check_error_stat=self.tolerance.statistic,
            atol={"": self.tolerance.absolute, "logits": self.tolerance.logits},
            rtol=self.tolerance.relative,
            infinities_compare_equal=True,
        )

        def results(name: str, side: int) -> tuple[str, list[Any]]:
            outputs = ({k: v for k, v in pair[side].items() if v.size} for pair in pairs)
            return name, [IterationResult(out, runner_name=name) for out in outputs]

        verdicts: dict[str, bool] = {}
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(invalid="ignore", divide="ignore"):
            accuracy = Comparator.compare_accuracy(
                RunResults([results(self.target.name, 1), results("pytorch", 0)]), compare_func=compare
            )
        for iteration in next(iter(accuracy[0].values())):
            for output, result in iteration.items():
                verdicts[output] = verdicts.get(output, True) and bool(result)
        return verdicts


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm else 1.0
