"""Prove a package in one call: options, answers from PyTorch or a file, verdict."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.errors import ConfigError, ModelNotFoundError, NotLinearizedError, PackageError, UnsupportedError
from still_export.extras import demand
from still_export.graph.options import ExportOptions
from still_export.loading.runtimes import runtime_of
from still_export.options import check_options, option
from still_export.package.folder import Package, as_package_errors, open_package
from still_export.proof.answers import Progress, silent
from still_export.proof.inputs import Input, check_named, hash_of, inputs_of
from still_export.proof.judge import Report
from still_export.proof.prompts import Ranges
from still_export.proof.runs import Asking
from still_export.proof.sessions import Subject
from still_export.proof.texts_asked import prompt_words
from still_export.proof.verdict import Kind, Verdict
from still_export.proof.verify import Verifier
from still_export.runtime.cuda_driver import CudaError
from still_export.runtime.sampling import RunError
from still_export.targets.registry import packaged_target
from still_graphs.states import StateTable

if TYPE_CHECKING:
    from still_export.models.read.weights import Pair
    from still_export.proof.cases import CaseSource
    from still_export.proof.quantized import QuantizationLoss


@dataclass(frozen=True)
class VerifyOptions:
    """How a package is compared with PyTorch; every field is a flag of `still-export verify`."""

    model: str | None = option(None, "The PyTorch model, if it is no longer where it was exported from.")
    overlays: tuple[str, ...] = option(
        (), "With --model: an adapter that the package was exported with; repeatable.", flag="--overlay"
    )
    lengths: tuple[int, ...] = option(
        (), "Prompt lengths.", commas=True, shown="drawn, by octaves up to the capacity as time allows"
    )
    decode_steps: int | None = option(None, "Single-token steps after a prefill.", least=1, shown="72")
    seed: int | None = option(None, "Seed of the prompts.", shown="drawn")
    quick: bool = option(False, "Two prompts of 1 and 65 tokens and four steps; says what it leaves out.")
    runtime: str | None = option(None, "ort, trt, torch or vllm.", shown="the package's target")
    provider: str = option("cpu", "Of ONNX Runtime: cpu or cuda.")
    plugin: Path | None = option(None, "trt: plugin library in the place of the package's.")
    adapter: Path | None = option(None, "LoRA adapter to run a package with that was exported with --adapters.")
    calls: Path | None = option(None, "Read PyTorch's answers from a file made with --record.")
    text: Path | None = option(
        None, "Quantized packages: a text to measure the quantization loss on, in bits per byte."
    )
    polygraphy: bool = option(False, "Also write calls.npz, data_loader.py and polygraphy.sh of a package that passes.")
    reference_device: str | None = option(
        None, "Where PyTorch answers: cpu or cuda.", shown="where the runtime runs", choices=("cpu", "cuda")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.quick and (self.lengths or self.decode_steps is not None or self.calls is not None):
            raise ConfigError("--quick says which prompts there are: leave out --lengths, --decode-steps and --calls.")
        if self.adapter is not None and self.calls is not None:
            raise ConfigError("--adapter is compared where PyTorch answers: give it without --record and --calls.")
        if self.reference_device is not None and self.calls is not None:
            raise ConfigError("--calls is what PyTorch answered already: leave out --reference-device.")


@dataclass(frozen=True)
class VerifyResult:
    """The verdict, and for a quantized package the `loss` of its bits."""

    report: Report
    subject: Subject
    loss: QuantizationLoss | None = None
    inputs: tuple[Input, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the package computes what PyTorch computes."""
        return self.report.passed

    def to_dict(self) -> dict[str, Any]:
        inputs = [vars(each) for each in self.inputs]
        return {
            **self.report.to_dict(),
            "inputs": inputs,
            **({} if self.loss is None else {"quantization_loss": self.loss.to_dict()}),
        }


def verify(
    package: str | Path,
    options: VerifyOptions = VerifyOptions(),
    output: Path | None = None,
    *,
    progress: Progress = silent,
) -> VerifyResult:
    """Compare a package with PyTorch on logits, every state tensor and every selection.

    Args:
        output: An existing folder for the calls that polygraphy can repeat; None: the package's `verify`.

    Raises:
        ConfigError: An option does not fit the package.
        PackageError: The package is damaged, has no engine yet, or does not run here.
        ModelNotFoundError: The model that it was exported from is not there.
    """
    proof = _Proof(package, options)
    pairs: Mapping[str, tuple[Pair, ...]] = {}
    added: dict[str, Any] = {}
    manifest, folder = proof.package.manifest, proof.package.path
    if options.adapter is not None:
        from still_export.models.read.adapters import adapter_inputs, read_pairs

        pairs, added = read_pairs(options.adapter, manifest), adapter_inputs(options.adapter, manifest)
    subject = proof.ready(added)
    inputs = _inputs(proof)
    weights = _compare_weights(proof, progress)
    if output is None:
        output = folder / "verify"
        output.mkdir(exist_ok=True)
    try:
        report = _compare_runs(proof, subject, pairs, output, progress)
    except (RunError, CudaError) as error:
        raise PackageError(str(error)) from error
    report = report.including(weights).including(_other_files(proof, progress))
    if options.quick:
        report = report.including(Verdict([], QUICK_LEAVES_OUT))
    if manifest.get("vision") and options.calls is None:
        from still_export.proof.vision import vision_check

        model_options = _options(proof.package, options, manifest["model"]["dtype"])
        with as_package_errors():
            report = report.including(Verdict.of([vision_check(proof.package, model_options, proof.seed)]))
    if options.calls is not None or not proof.quantized:
        return VerifyResult(report, subject, inputs=inputs)
    if options.quick and options.text is None:
        return VerifyResult(report.including(Verdict([], [QUICK_LOSS])), subject, inputs=inputs)
    from still_export.proof.quantized import quantization_loss_of

    wide = _options(proof.package, options, "float32")
    device = options.reference_device or "cpu"
    loss = quantization_loss_of(wide, folder, manifest, options.text, device)
    return VerifyResult(report, subject, loss, inputs)


def _compare_weights(proof: _Proof, progress: Progress) -> Verdict:
    """Compare every weight of the package with the model's, and the model with what other readers find in its files."""
    if proof.options.calls is not None:
        return Verdict(
            not_asked=["the weights by themselves: PyTorch's answers are from a file; verify without --calls"]
        )
    from still_export.folders.model import resolve_source
    from still_export.models.read.source import find_source
    from still_export.proof.derived import check_derived
    from still_export.proof.held_weights import check_weights
    from still_export.proof.source_reader import check_source

    package = proof.package
    _check_device(proof.options.reference_device)
    model_options = _options(package, proof.options, "float32")
    with _found(package):
        source = find_source(model_options)
        derived = check_derived(
            package, _options(package, proof.options, package.manifest["config"]["dtype"]), progress
        )
    verdict = derived.verdict.of_kind(Kind.FILES)
    weights = check_weights(package.path, package.manifest, source, progress, derived.compared)
    verdict.add(weights.of_kind(Kind.WEIGHTS))
    progress("reading the model's files as others do", 0, 0)
    overlays = [resolve_source(overlay) for overlay in model_options.overlays]
    model = resolve_source(model_options.model, model_options.revision)
    verdict.add(check_source(source, model_options, model, overlays).of_kind(Kind.READING))
    return verdict


def _compare_runs(
    proof: _Proof, subject: Subject, pairs: Mapping[str, tuple[Pair, ...]], folder: Path, progress: Progress
) -> Report:
    """Compare what computes: graphs in float32, runtimes in the package's type, kernels by themselves."""
    package, options = proof.package, proof.options
    open_package(package.path)  # right before it runs, every file has its hash
    if options.calls is not None:
        from still_export.proof.recorded import RecordedCases

        cases = RecordedCases(options.calls, package)
        lacks = (
            "the graph in float32, and kernels by themselves: PyTorch's answers are from a file; verify without --calls"
        )
        report = Report.empty().with_run(
            subject.title, Verifier(package, cases, subject, proof.steps).run(folder, progress, options.polygraphy)
        )
        return report.including(Verdict([], [lacks]))
    from still_export.proof.kernels import check_kernels
    from still_export.proof.runs import compare_graphs, compare_runtimes

    asking = proof.asking(pairs)
    report = compare_graphs(asking, subject.adapter, progress)
    if package.manifest["model"]["dtype"] == "bfloat16":
        return report.including(Verdict([], [BFLOAT16]))
    report = report.joined(compare_runtimes(asking, subject, proof.steps, folder, progress, options.polygraphy))
    return report.including(check_kernels(asking, subject, progress))


def _other_files(proof: _Proof, progress: Progress) -> Verdict:
    """Prove what a user runs besides graphs and runtime: programs, tokenizer, settings."""
    from still_export.proof.package_programs import check_programs
    from still_export.proof.whole_package import check_files

    package, options, verdict = proof.package, proof.options, Verdict()
    progress("running the package's programs", 0, 0)
    verdict.add(check_programs(package, options.provider))
    if options.calls is not None:
        verdict.not_asked.append("tokenizer, chat format and settings: the model is not here; verify without --calls")
        return verdict
    with _found(package):
        from still_export.folders.model import resolve_source

        model_options = _options(package, options, "float32")
        files = check_files(package, resolve_source(model_options.model, model_options.revision))
        verdict.add(files.of_kind(Kind.SETTINGS))
    return verdict


def _check_device(device: str | None) -> None:
    """Raise ConfigError if PyTorch's device is missing."""
    if device == "cuda" and not _has_cuda():
        raise ConfigError("--reference-device cuda: PyTorch finds no such device here. Leave it out: the CPU answers.")


@contextlib.contextmanager
def _found(package: Package) -> Iterator[None]:
    """Add to errors about a missing or other model what the model is needed for."""
    try:
        yield
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error} The package was exported from it; if the model was moved, name it with --model. "
            f"Type: still-export verify {package.path} --model MODEL"
        ) from error
    except NotLinearizedError as error:
        made_of = package.manifest["config"]["model"]
        raise NotLinearizedError(
            f"--model is a plain softmax model, and {package.path} was exported from one that was linearized, {made_of}. "
            f"Name that one, or leave --model out. Type: still-export verify {package.path}"
        ) from error


def record(
    package: str | Path,
    path: Path,
    options: VerifyOptions = VerifyOptions(),
    *,
    selections: Path | None = None,
    progress: Progress = silent,
) -> int:
    """Write PyTorch's answers to the file `path`, for machines without PyTorch and for all packages lowered from the same one.

    Args:
        selections: A file that `select` wrote; PyTorch answers its prompts with its selections.

    Returns:
        The number of cases.

    Raises:
        As `verify`, except errors of the runtime, which is not used.
    """
    from still_export.proof.recorded import record_cases
    from still_export.proof.selections import Selections

    _check_written(options, "--record")
    proof = _Proof(package, options)
    if options.text is not None:
        raise ConfigError(TEXT)
    if selections is None:
        cases = proof.recorded_cases()
        record_cases(cases, proof.package, path, progress)
        return cases.count
    if options.lengths or options.decode_steps is not None or options.seed is not None:
        raise ConfigError("--follow says which prompts there are: leave out --lengths, --decode-steps and --seed.")
    chosen = Selections.read(selections, proof.package)
    cases = proof.recorded_cases(chosen.ranges, chosen.words)
    chosen.begin(cases)
    record_cases(cases, proof.package, path, progress, chosen.decisions)
    return cases.count


def select(
    package: str | Path,
    path: Path,
    options: VerifyOptions = VerifyOptions(),
    *,
    progress: Progress = silent,
) -> int:
    """Write the runtime's selections for the prompts of a proof to the file `path`, for `record` on a machine with PyTorch.

    Returns:
        The number of cases.

    Raises:
        ConfigError: An option does not fit, or the package makes no selections.
        PackageError: The package is damaged, has no engine yet, or does not run here.
    """
    from still_export.proof.chains import empty_feed
    from still_export.proof.prompts import Prompts
    from still_export.proof.selections import write_selections
    from still_kernels.registry import ties_of

    _check_written(options, "--selections")
    if options.text is not None:
        raise ConfigError(TEXT)
    proof = _Proof(package, options)
    manifest = proof.package.manifest
    if not ties_of(manifest).shown.each:
        raise ConfigError(f"{package} selects nothing that its states show: record PyTorch's answers without --follow.")
    subject = proof.ready({})
    open_package(proof.package.path)  # right before it runs
    words = prompt_words(proof.package.path, manifest)
    prompts = Prompts(manifest, partial(empty_feed, StateTable.of(manifest)), proof.ranges(1.0), words)
    try:
        with subject.open() as session:
            write_selections(session, prompts, proof.package, path, progress)
    except (RunError, CudaError) as error:
        raise PackageError(str(error)) from error
    return prompts.count


def _check_written(options: VerifyOptions, flag: str) -> None:
    """Raise ConfigError for comparison flags in a verb that compares nothing."""
    if options.adapter is not None:
        raise ConfigError(f"--adapter is compared where PyTorch answers: give it without {flag} and --calls.")
    if options.calls is not None:
        raise ConfigError(f"{flag} writes a file and --calls reads one; give one of them.")


QUICK, QUICK_STEPS = (1, 65), 4
"""Prompts and steps of `--quick`."""
QUICK_LEAVES_OUT = [
    f"--quick: prompts of other lengths than {' and '.join(map(str, QUICK))} tokens, and steps behind the first {QUICK_STEPS}"
]
BFLOAT16 = "the runtime in bfloat16: NumPy has no such type; the graph in float32 was compared"
QUICK_LOSS = "--quick: what the bits cost (quantization loss)"
TEXT = "--text measures the quantization loss: give it with a quantized package, without --record and --calls."


class _Proof:
    """An opened package and its proof's options; raises ConfigError and PackageError like `verify`."""

    def __init__(self, package: str | Path, options: VerifyOptions) -> None:
        self.package, self.options = open_package(Path(package), check_hashes=False, only_listed=True), options
        manifest = self.package.manifest
        check_named(options.model, options.overlays, ExportOptions.from_manifest(manifest).overlays, self.package.path)
        self.target, self.runtime = packaged_target(manifest), runtime_of(manifest["target"], options.runtime)
        self.quantized = manifest.get("quantization") is not None
        if options.text is not None and (not self.quantized or options.calls is not None):
            raise ConfigError(TEXT)
        _check_lengths(options.lengths, self.package)
        self.seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
        self.steps = QUICK_STEPS if options.quick else options.decode_steps or self.target.decode_steps
        on_gpu = options.provider == "cuda" or self.runtime.engines
        self.device = options.reference_device or ("cuda" if on_gpu and _has_cuda() else "cpu")

    def ranges(self, share: float) -> Ranges:
        """What is asked in this part of the time."""
        options, manifest = self.options, self.package.manifest
        if not options.lengths and not options.quick:
            return replace(Ranges.of(manifest, self.seed, self.device, share), steps=self.steps)
        capacity = manifest["capacity"]
        most = capacity["capacity_tokens"] if capacity["bounded"] else max(QUICK)
        lengths = tuple(n for n in QUICK if n <= most) if options.quick else options.lengths
        return Ranges(lengths, self.steps, seed=self.seed)

    def ready(self, added: dict[str, Any]) -> Subject:
        """The runtime, with what an adapter adds.

        Raises:
            PackageError: It has no engine yet.
            ModuleNotFoundError: It is not installed.
        """
        manifest, folder = self.package.manifest, self.package.path
        if self.runtime.engines and not manifest["engines"]:
            raise PackageError(f"{folder} has no engine yet. Build it on this machine: still-export build {folder}")
        host = self.target.host if self.options.runtime is None else None
        demand(*filter(None, [host]))
        plugin = self.options.plugin
        return Subject(self.package, self.runtime.name, self.options.provider, plugin, added, genai=host is not None)

    def asking(self, pairs: Mapping[str, tuple[Pair, ...]]) -> Asking:
        """What all runs share."""
        _check_device(self.options.reference_device)
        words = prompt_words(self.package.path, self.package.manifest)
        return Asking(self.package, self._options_of, self.ranges, pairs, self.device, words)

    def recorded_cases(self, ranges: Ranges | None = None, words: list[int] | None = None) -> CaseSource:
        """Cases in the package's own type, for a file."""
        _demand_numpy_type(self.package)
        asking = self.asking({})
        asking = asking if words is None else replace(asking, words=words)
        if self.quantized:  # otherwise its weights are the model's
            open_package(self.package.path)
        return (
            asking.cases(self.package)
            if ranges is None
            else replace(asking, ranges=lambda share: ranges).cases(self.package)
        )

    def _options_of(self, package: Package, dtype: str) -> ExportOptions:
        with _found(package):
            return _options(package, self.options, dtype)


def _has_cuda() -> bool:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _demand_numpy_type(package: Package) -> None:
    """Raise UnsupportedError where NumPy lacks the package's type."""
    if (dtype := package.manifest["model"]["dtype"]) not in ("float32", "float16"):
        raise UnsupportedError(
            f"the package's weights are {dtype}, and NumPy arrays, which a file of answers has, have no such type. "
            "Record the answers for an export of the same model with --dtype float32 or float16."
        )


def _check_lengths(lengths: tuple[int, ...], package: Package) -> None:
    """Raise ConfigError for `--lengths` beyond the capacity; default lengths beyond it are left out."""
    capacity = package.manifest["capacity"]
    limit = capacity["capacity_tokens"] if capacity["bounded"] else max(lengths, default=1)
    for length in lengths:
        if not 1 <= length <= limit:
            raise ConfigError(f"--lengths {length} is outside 1..{limit}, the capacity of {package.path}.")


def _options(package: Package, given: VerifyOptions, dtype: str) -> ExportOptions:
    """The package's export options, in `dtype`, of the user's model and overlays if a model is named."""
    options = ExportOptions.from_manifest(package.manifest)
    if given.model is not None:
        options = replace(options, model=given.model, overlays=given.overlays, revision=None)
    return replace(options, dtype=dtype)


def _inputs(proof: _Proof) -> tuple[Input, ...]:
    """What the reference is read from, with hashes."""
    if proof.options.calls is not None:
        return (Input("answers of PyTorch", str(proof.options.calls), hash_of(proof.options.calls), "user"),)
    from still_export.folders.model import resolve_source

    options = _options(proof.package, proof.options, "float32")
    with _found(proof.package):
        model = resolve_source(options.model, options.revision)
    overlays = [resolve_source(name) for name in options.overlays]
    return tuple(
        inputs_of(model, overlays, proof.options.adapter, "user" if proof.options.model is not None else "package")
    )
