"""The runs of a package that are compared with PyTorch: its graph in float32, and the runtime in the package's own type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.package.files import HEAD, MODEL, PORTABLE
from still_export.package.folder import Package
from still_export.package.refusals import RunError
from still_export.proof.answers import EMPTY, DecisionsByCase, Progress, Question, silent
from still_export.proof.cases import Case, CaseSource
from still_export.proof.constants import DISTURBED, NEAR_CODE, STORED_DRAWS
from still_export.proof.judge import Report
from still_export.proof.prompts import Ranges
from still_export.proof.sessions import WIDENED, Subject, widened_manifest
from still_export.proof.verdict import Check, Verdict
from still_export.proof.verify import Verifier
from still_export.runtime.feeding import Feeding

if TYPE_CHECKING:
    import torch

    from still_export.graph.options import ExportOptions
    from still_export.models.load import Source
    from still_export.models.read.weights import Pair, Weight
    from still_export.proof.torch_cases import TorchCases

NEAR = 1e-3
"""Two runtimes selected the same token if its numbers differ by at most this, relative to the layer's largest."""
OWN_SHARE = 0.25
"""Part of a proof's tokens that are asked in the package's own type."""
IN_FLOAT32, PORTABLE_IN_FLOAT32 = "graph in float32", "portable graph in float32"
Options = Callable[[Package, str], "ExportOptions"]
"""Export options of a package in a type."""


@dataclass(frozen=True)
class Asking:
    """What the runs of a package share.

    Args:
        options: The user's model in a type.
        ranges: What is asked, by the part of the time that it may take.
        pairs: An adapter's pairs, by weight.
        device: PyTorch's.
        words: Tokens of texts.
    """

    package: Package
    options: Options
    ranges: Callable[[float], Ranges]
    pairs: Mapping[str, tuple[Pair, ...]]
    device: str
    words: Sequence[int]

    def cases(self, package: Package, share: float = 1.0) -> TorchCases:
        return torch_cases(package, self.options, self.ranges(share), self.pairs, self.device, self.words)


def compare_graphs(asking: Asking, adapter: Mapping[str, Any], progress: Progress = silent) -> Report:
    """Compare the package's graphs in float32, by function bodies on ONNX Runtime's CPU provider, with PyTorch in float64."""
    from still_export.proof.widen import has_bodies

    report, package = Report.empty(), asking.package
    if not has_bodies(package.path / MODEL):
        lacks = "the graph in float32: this target's graph has no function bodies; verify the package --to onnx that it is lowered from"
        return report.including(Verdict([], [lacks]))
    wide = Package(package.path, widened_manifest(package.manifest))
    ranges = asking.ranges(1.0)
    cases = asking.cases(wide)
    drawn = DrawnOnce(cases)
    graphs = {IN_FLOAT32: MODEL}
    if HEAD in package.manifest["files"]:
        together = (
            "the portable graph in float32: it holds the model and the head together, whose graphs are asked one by one"
        )
        report = report.including(Verdict([], [together]))
    elif PORTABLE in package.manifest["files"]:
        graphs[PORTABLE_IN_FLOAT32] = PORTABLE
    for name, graph in graphs.items():
        # The portable graph is compared with the last cases, which hold the longest sequence.
        few = drawn if graph == MODEL else drawn.last(4)
        subject = Subject(wide, "ort", adapter=dict(adapter), bodies=True, graph=graph)
        report = report.with_run(name, _compare(wide, few, subject, progress, name))
    if not Feeding.of(package.manifest).whole_prompts:
        report = report.including(Verdict.of([cases.causality()]))
    report.asked.append(f"{IN_FLOAT32}: {ranges.asked()}")
    return report.including(Verdict([], ranges.not_asked(package.manifest)))


def compare_runtimes(
    asking: Asking,
    subject: Subject,
    replays: int,
    folder: Path | None,
    progress: Progress = silent,
    save_calls: bool = False,
) -> Report:
    """Compare runtimes in the package's own type with PyTorch in that type: `subject`, the other provider that the package has kernels for,
    and kernels that this machine does not load.

    Args:
        replays: Tokens of the runtime's own checks.
        folder: For polygraphy's calls, which are written after a mismatch, or if `save_calls`.
    """
    package, report = asking.package, Report.empty()
    drawn = DrawnOnce(asking.cases(package, OWN_SHARE))
    providers, missing = [subject.provider], ""
    if (package.manifest.get("native") or {}).get("archs") and subject.record.graphs:
        missing = cuda_missing()
        providers += [] if missing else [each for each in ("cpu", "cuda") if each != subject.provider]
    for provider in providers:
        of = subject if provider == subject.provider else Subject(package, "ort", provider, adapter=subject.adapter)
        first = of is subject
        into = folder if first else None
        run = _compare(package, drawn, of, progress, of.title, replays if first else 0, into, save_calls)
        report = report.with_run(of.title, run)
    report.asked.append(f"{subject.title}: {asking.ranges(OWN_SHARE).asked()}")
    return report.including(Verdict([], [f"the package's kernels for GPUs: {missing}"] if missing else []))


def _compare(
    package: Package,
    cases: DrawnOnce,
    subject: Subject,
    progress: Progress,
    name: str,
    replays: int = 0,
    folder: Path | None = None,
    save_calls: bool = False,
) -> Report:
    def say(phase: str, done: int, total: int) -> None:
        progress(f"{name}: {phase}", done, total)

    try:
        run = partial(Verifier.run, folder=folder, progress=say, save_calls=save_calls)
        return judge(Verifier(package, cases, subject, replays), cases, run)
    except RunError as error:
        if folder is not None:
            raise
        return Report.empty().including(Verdict.of([Check("runs", False, str(error), subject.graph)]))


def judge(verifier: Verifier, cases: DrawnOnce, run: Callable[[Verifier], Report] = Verifier.run) -> Report:
    """Compare once, and again if the reference made another subject's choices at a near tie, or if rows may amplify roundings."""
    report = run(verifier)
    if cases.again and (not report.passed or report.selections.near_ties):  # its choice may be another token
        cases.forget()
        report = run(verifier)
    beyond = {each.case for each in report.mismatches}
    for draw in range(STORED_DRAWS):
        if not (report.may_be_storing and cases.store_again(beyond, draw)):
            break
        report = run(verifier)
    for seed in range(DISTURBED):
        if not (report.may_be_rounding and cases.disturb({each.case for each in report.mismatches}, seed)):
            break
        report = run(verifier)
    return report


def cuda_missing() -> str:
    """Why ONNX Runtime's CUDA provider is not available; empty: it is."""
    import onnxruntime

    from still_export.runtime.cuda_driver import CudaError, Driver
    from still_export.runtime.ort_session import CUDA

    if CUDA not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {CUDA}"
    try:
        return "" if Driver.device_count() else "this machine has no GPU"
    except CudaError as error:
        return str(error).rstrip(".")


class DrawnOnce:
    """PyTorch's answers, computed once for several subjects with the same questions. They use the choices of the first subject.

    Args:
        numbers: Cases to use.

    Attributes:
        again: The last answers were those for an earlier subject.
    """

    def __init__(self, source: CaseSource, numbers: Sequence[int] | None = None) -> None:
        self.source, self.uses_decisions = source, source.uses_decisions
        self.numbers = range(source.count) if numbers is None else numbers
        self.count = len(self.numbers)
        self.head = getattr(source, "head", None)
        self.again = False
        self._questions: dict[int, Question] = {}
        self._drawn: dict[int, Case] = {}
        self._decisions: DecisionsByCase = {}

    def last(self, count: int) -> DrawnOnce:
        """The last `count` of these cases, with their answers."""
        few = DrawnOnce(self.source, self.numbers[-count:])
        few.head, first = None, self.count - few.count
        few._questions = {n - first: x for n, x in self._questions.items() if n >= first}
        few._drawn = {n - first: x for n, x in self._drawn.items() if n >= first}
        few._decisions = {n - first: x for n, x in self._decisions.items() if n >= first}
        return few

    @property
    def progress(self) -> Progress:
        return self.source.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.source.progress = progress

    def begin(self, number: int) -> Question:
        if number not in self._questions:
            self._questions[number] = self.source.begin(self.numbers[number])
        return self._questions[number]

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
        """Like CaseSource; reuses the first subject's answers if the subject may have made the same choices."""
        self.again = bool(self._drawn) and all(
            each.is_like(self._decisions.get(number), NEAR) for number, each in decisions.items()
        )
        if not self.again:
            of = {self.numbers[number]: each for number, each in decisions.items()}
            cases = self.source.draw([self.numbers[number] for number in numbers], of)
            self._drawn, self._decisions = dict(zip(numbers, cases, strict=True)), decisions
        return [replace(self._drawn[number]) for number in numbers]

    def forget(self) -> None:
        self._drawn = {}

    def disturb(self, names: Collection[str], seed: int) -> bool:
        """Let bounds of the cases of these names, or that they begin with, grow where they amplify; returns whether the source can: in
        float32, where a disturbance is small and still far beyond rounding."""
        import torch

        from still_export.proof.torch_cases import TorchCases

        if not isinstance(self.source, TorchCases) or self.source.own.dtype != torch.float32:
            return False
        draw = partial(self.source.draw_disturbed, seed=seed)
        self._drawn |= {n: case.amplifying(more) for n, case, more in self._drawn_again(names, draw)}
        return True

    def store_again(self, names: Collection[str], draw: int) -> bool:
        """Let bounds of the cases of these names, or that they begin with, hold another own run, which stores numbers about halfway between
        two of a cache's type either way; of an even draw and the next, with the same names, each such number is stored both ways. Returns
        whether the source has such a cache."""
        import torch

        from still_export.proof.torch_cases import TorchCases

        if not isinstance(self.source, TorchCases) or not self.source.own.rounds_states:
            return False
        self.source.own.either = NEAR_CODE * (-1) ** draw, torch.Generator().manual_seed(draw // 2)
        try:
            self._drawn |= {n: case.storing(more) for n, case, more in self._drawn_again(names, self.source.draw)}
        finally:
            self.source.own.either = None
        return True

    def _drawn_again(
        self, names: Collection[str], draw: Callable[[list[int], DecisionsByCase], list[Case]]
    ) -> Iterator[tuple[int, Case, Case]]:
        """The cases of these names, or that they begin with, by number: as they are, and drawn again."""
        cases = {n: case for n, case in self._drawn.items() if any(name.startswith(case.name) for name in names)}
        decisions = {self.numbers[n]: self._decisions[n] for n in cases if n in self._decisions}
        again = draw([self.numbers[n] for n in cases], decisions)
        return ((n, case, more) for (n, case), more in zip(cases.items(), again, strict=True))


def torch_cases(
    package: Package,
    options: Options,
    ranges: Ranges,
    pairs: Mapping[str, tuple[Pair, ...]],
    device: str,
    words: Sequence[int],
) -> TorchCases:
    """Cases answered by PyTorch with the package's weights (and an adapter's `pairs`): in a wider type, and in its own. Those of a
    widened package have its stored weights, in float64 and float32."""
    import torch

    from still_export.graph.quantization.policy import rounds_activations
    from still_export.graph.quantization.read import package_source, quantized_names, round_activations
    from still_export.proof.ahead import HeadCases
    from still_export.proof.layerwise import LayerwiseModel
    from still_export.proof.torch_cases import TorchCases

    manifest, folder = package.manifest, package.path
    stored = manifest.get(WIDENED)
    dtype = manifest["model"]["dtype"]
    rounded = rounds_activations(manifest) and not stored
    wide = package_source(options(package, "float32"), folder, manifest, pairs, device)
    if stored and stored != "float32":
        narrow = package_source(options(package, stored), folder, manifest, pairs, device)
        wide = _as_stored(wide, narrow, package)
    if dtype == "float32":
        own = replace(wide, config=deepcopy(wide.config))  # a configuration has the model's type
    else:
        own = package_source(options(package, dtype), folder, manifest, pairs, device)

    def round_inputs(model: Any) -> None:
        quantization = manifest["quantization"]
        round_activations(model, quantized_names(folder), quantization["block_size"], quantization["scheme"])

    exact = torch.float64 if dtype == "float32" and not rounded else torch.float32
    computed = torch.float32 if dtype == "float32" else None
    reference = LayerwiseModel(manifest, wide, device=device, dtype=exact)
    scalars = getattr(torch, stored) if stored and stored != "float32" else None
    own_run = LayerwiseModel(manifest, own, round_inputs if rounded else None, device, computed, scalars)
    cases = TorchCases(manifest, reference, own_run, ranges, words)
    if HEAD in manifest["files"]:
        head = partial(_head, package, options, stored)
        right, mine = partial(head, wide, exact, False), partial(head, own, computed, rounded)
        cases.head = HeadCases(right, mine, cases.prompts.chunk, ranges.seed)
    return cases


def _as_stored(wide: Source, narrow: Source, package: Package, head: bool = False) -> Source:
    """`wide` with the weights of `narrow`, which has the package's type; quantized ones are decoded in float32."""
    from still_export.graph.quantization.read import quantized_names
    from still_export.models.ahead import weight_name

    coded = quantized_names(package.path, HEAD if head else MODEL) if package.manifest.get("quantization") else {}
    weights: dict[str, Weight] = {
        name: each if weight_name(name, head) in coded else narrow.weights[name] for name, each in wide.weights.items()
    }
    return replace(wide, weights=weights)


def _head(
    package: Package,
    options: Options,
    stored: str | None,
    source: Source,
    kind: torch.dtype | None,
    rounds: bool,
) -> Any:
    """The MTP head of `source` with the package's weights."""
    from still_export.graph.quantization.read import quantized_names, round_activations, with_package_head
    from still_export.models.read.source import find_source

    manifest = package.manifest
    found = with_package_head(source, package.path, manifest)
    if stored and stored != "float32":
        narrow = with_package_head(find_source(options(package, stored)), package.path, manifest)
        found = _as_stored(found, narrow, package, head=True)
    model = found.read().to(kind)
    if rounds:
        names = quantized_names(package.path, HEAD)
        round_activations(model, names, manifest["quantization"]["block_size"], head=True)
    return model
