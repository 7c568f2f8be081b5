"""The verbs as functions: options are keyword arguments, named as the verb's flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from still_export.errors import unknown
from still_export.loading.language_model import LanguageModel

if TYPE_CHECKING:
    from still_export.evaluation.bench import Measurement
    from still_export.evaluation.evaluate import Evaluation
    from still_export.evaluation.prove import Proven
    from still_export.graph.options import ExportOptions
    from still_export.package.folder import Package
    from still_export.proof.package import VerifyResult

Options = TypeVar("Options")


def export(
    model: str | Path | ExportOptions,
    output: str | Path,
    *,
    to: str = "onnx",
    force: bool = False,
    dump_dir: Path | None = None,
    **options: Any,
) -> Package:
    """Export a model to the package of a target.

        still_export.export("MODEL", "DIR", to="trt", dtype="float16")

    Args:
        model: Folder, GGUF file or hub id; or, as in scripts of 0.1, a record of all that an export asks, whose target's `options` are a
            record, too.
        output: The package folder; it appears only once it is complete.
        to: Target named as in `--to`, or a record's name.
        force: Replace `output`.
        dump_dir: Folder for the graph after each step, without weights.
        options: Flags of `still-export export`, such as `quantize="int4"` or `capacity_tokens=4096`.

    Raises:
        ConfigError: An option is unknown, or not one of the target.
        StillExportError: The model cannot be read or exported, or the package cannot be written.
    """
    from still_export.graph.options import ExportOptions
    from still_export.mixers.choices import StillChoices
    from still_export.options import names_of
    from still_export.targets import export as targets_export
    from still_export.targets.registry import TARGETS

    if isinstance(model, ExportOptions):
        _demand_known(options, ["options"])
        return targets_export.export(model, output, to=to, force=force, dump_dir=dump_dir, **options)
    _demand_known(
        options, {*names_of(ExportOptions), *names_of(StillChoices), *(flag for t in TARGETS for flag in t.flags)}
    )
    job = targets_export.plan_job(to, {**options, "model": str(model)})
    return targets_export.export(
        job.export_options, output, to=job.to, options=job.options, force=force, dump_dir=dump_dir
    )


def lower(
    package: str | Path, to: str, output: str | Path, *, dtype: str | None = None, force: bool = False, **options: Any
) -> Package:
    """Lower a portable package to another target; bits and capacity stay as exported. Low-bit weights in a form or type that the target
    lacks are quantized again from the model that the package names.

    Args:
        to: Target named as in `--to`, or a record's name, such as trt8.
        dtype: float16 or bfloat16, for a package in float32; None: unchanged.
        force: Replace `output`.
        options: Flags of the target.

    Raises:
        ConfigError: An option is unknown, or not one of the target.
        StillExportError: The package is not portable, the target does not support it, or a tool is missing.
    """
    from still_export.targets.export import lower_or_export
    from still_export.targets.registry import targets_of

    _demand_known(options, targets_of(to)[0].flags)
    return lower_or_export(package, to, output, options, dtype=dtype, force=force)


def verify(package: str | Path, *, output: Path | None = None, **options: Any) -> VerifyResult:
    """Compare a package with PyTorch.

        assert still_export.verify("DIR", lengths=(1, 65)).passed

    Args:
        output: An existing folder for the calls that polygraphy can repeat; None: the package's `verify`.
        options: Fields of VerifyOptions: the flags of `still-export verify`.

    Raises:
        ConfigError: An option is unknown, or does not fit the package.
        PackageError: The package is damaged, has no engine yet, or does not run here.
        ModelNotFoundError: The model that it was exported from is not there.
    """
    from still_export.models.ambient import plain_torch
    from still_export.proof import package as proof

    with plain_torch():
        return proof.verify(package, _options(proof.VerifyOptions, options), output)


def bench(
    package: str | Path, *, progress: Callable[[str], None] = lambda done: None, **options: Any
) -> list[Measurement]:
    """Measure prefill, decode and peak memory of a package by context length, each in its own process.

    Args:
        progress: Called with each finished length.
        options: Fields of BenchOptions: the flags of `still-export bench`.

    Returns:
        One measurement per length, in seconds, milliseconds and MB.

    Raises:
        ConfigError: An option is unknown, or a length does not fit.
    """
    from still_export.evaluation import bench as measuring

    return measuring.bench(package, _options(measuring.BenchOptions, options), progress)


def prove(package: str | Path, *, progress: Callable[[str], None] = lambda done: None, **options: Any) -> Proven:
    """Build, verify and measure a package as far as this machine can.

    Args:
        options: Fields of ProveOptions: the flags of `still-export prove`.

    Raises:
        ConfigError: An option is unknown, or the project has no runtime for this target.
        PackageError: The package is damaged or does not run here.
    """
    from still_export.evaluation import prove as proving

    return proving.prove(package, _options(proving.ProveOptions, options), progress)


def evaluate(models: Sequence[str | Path], *, output: Path | None = None, **options: Any) -> Evaluation:
    """Measure models: bits per byte, retrieval; for packages also size, memory and speed.

    Args:
        models: Folders of models, packages, and addresses of servers.
        output: Folder of results; None: none.
        options: Fields of EvaluationOptions: the flags of `still-export evaluate`.

    Raises:
        ConfigError: An option is unknown, or does not fit a model.
    """
    from still_export.evaluation.evaluate import EvaluationOptions
    from still_export.evaluation.models import evaluate as measure

    return measure(models, _options(EvaluationOptions, options), output)


def _options(kind: Callable[..., Options], values: Mapping[str, Any]) -> Options:
    """Options of a verb from keyword arguments."""
    from dataclasses import fields

    _demand_known(values, [field.name for field in fields(kind)])  # type: ignore[arg-type]
    return kind(**values)


def _demand_known(values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ConfigError for an argument that is no option."""
    names = sorted(known)
    for name in values:
        if name not in names:
            raise unknown(name, names, f"the option {name}")


def load(
    package: str | Path,
    *,
    runtime: str | None = None,
    provider: Literal["cpu", "cuda"] = "cpu",
    threads: int = 0,
    plugin: Path | None = None,
    trust_native: bool = False,
    check: bool = True,
    adapter: str | Path | None = None,
    prefix_cache: str | int = 0,
    prefix_dir: str | Path | None = None,
    guess: str | Path | None = None,
) -> LanguageModel:
    """The model of an exported package, ready to answer.

        model = still_export.load("package")
        print(model.generate("Once upon a time", max_tokens=64).text)
        for piece in model.generate([{"role": "user", "content": "Hello!"}], stream=True):
            print(piece, end="", flush=True)

    Args:
        package: Its folder.
        runtime: None = the package's own; "torch" is the PyTorch model that it was exported from.
        provider: ONNX Runtime's provider.
        threads: 0 = the runtime's choice.
        plugin: TensorRT plugin library to use instead of the package's.
        trust_native: Load native code of the package that this machine did not build, and remember it.
        check: Compare the weights with their hashes while they are loaded.
        adapter: Folder of a LoRA adapter to add, if the package was exported with --adapters; `use_adapter` exchanges it.
        prefix_cache: Bytes, or "2GiB", for states of prompts and answers, so that a call reads only the new part of its prompt.
        prefix_dir: Folder in which these states outlive the process.
        guess: Source of guessed tokens, if the package was exported with --speculate: "mtp", the model's own MTP head, "lookup" in the
            prompt and the answer so far, "none", or the folder of a draft model's package; None = mtp if there is a head, else lookup.

    Raises:
        ConfigError: The package does not fit the runtime, provider or adapter, or the cache's size is no size.
        RunError: The package does not run here, it has no head or accepts no guesses, or the draft has another tokenizer.
    """
    from still_export.loading.runtimes import open_runner, runtime_of
    from still_export.package.folder import open_package
    from still_export.package.trust import trust_package
    from still_export.runtime.draft import demand_guesses, open_draft
    from still_export.runtime.head import demand_head
    from still_export.runtime.prefix_folder import open_prefixes
    from still_export.runtime.speculation import Speculation
    from still_export.runtime.text import TextAhead

    folder = Path(package)
    manifest = open_package(folder, check_hashes=False).manifest  # the runner compares them
    if trust_native:
        trust_package(folder)
    chosen = runtime_of(manifest["target"], runtime).name
    text = TextAhead(folder, manifest)
    runner = open_runner(folder, manifest, chosen, provider, threads=threads, plugin=plugin, check=check)
    if guess == "none":
        runner.speculation = None
    elif guess == "lookup":
        demand_guesses(runner)
        runner.speculation = Speculation(runner.guesses)
    elif guess == "mtp":
        demand_head(runner)
    elif guess is not None:
        runner.speculation = open_draft(runner, load(guess, threads=threads, check=check, guess="none").runner)
    model = LanguageModel(runner, text=text)
    if adapter is not None:
        model.use_adapter(adapter)
    cache = open_prefixes(
        runner, prefix_cache, Path(prefix_dir) if prefix_dir else None
    )  # of the model with its adapter
    return LanguageModel(runner, cache, text) if cache else model
