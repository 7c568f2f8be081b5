"""Evaluation of models and packages named by folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, unknown
from still_export.evaluation.bench import BenchOptions
from still_export.evaluation.evaluate import (
    VARIANTS,
    Evaluation,
    EvaluationOptions,
    load_any,
    measure,
    measurements,
    pick_device,
    variants_of,
    write_evaluation,
)
from still_export.evaluation.packages import costs, open_model
from still_export.evaluation.served import ServedModel, is_served
from still_export.evaluation.synthetic import MAKERS
from still_export.models.load import load_tokenizer
from still_export.package.folder import Package, is_package, open_package


def evaluate(
    models: Sequence[str | Path],
    options: EvaluationOptions | None = None,
    output: Path | None = None,
    *,
    command: str = "",
    started: Callable[[int], Callable[[str], None]] = lambda count: lambda done: None,
) -> Evaluation:
    """Measure models: bits per byte, retrieval; for packages also size, memory and speed.

    Args:
        models: Folder of a STILL model (its parts are measured too) or of a softmax model; or packages, and addresses of servers.
        options: None: the defaults.
        output: An existing folder for tables; None: no tables are written.
        command: The command line, recorded in the tables.
        started: Called with the number of measurements; its result is called with each finished one.

    Returns:
        Results by model, or by variant of the one STILL model.

    Raises:
        ConfigError: There is nothing to measure, several models are not all packages, a package has no room for a length, or a measurement
            needs logits of a server.
        RunError: A server does not answer.
        DataError: A text is unusable.
    """
    options = options or EvaluationOptions()
    model, paths = str(models[0]), [str(m) for m in models]
    served = [m for m in paths if is_served(m)]
    packages = _packages([m for m in paths if m not in served], alone=not served)
    if served:
        _check_served(options)
    lengths = (*(options.lengths if options.tasks else ()), *(options.context_lengths if options.texts else ()))
    lengths += (options.by_position,) if options.texts and options.by_position else ()
    longest = max(lengths, default=2)
    if not lengths:
        raise ConfigError("nothing to measure. Give --text or --tasks.")
    for name, package in packages.items():
        _check_room(name, longest, package.manifest["capacity"])
    writes = not MAKERS.keys().isdisjoint(options.tasks)
    source = None if packages or served else model
    loaded = load_any(source, options.teacher, options.dtype, generates=writes, tokens=longest)
    if options.teacher is not None and source is not None and "still" not in loaded:
        raise ConfigError(f"{model} is a softmax model; --teacher is for STILL models.")
    if "still" in loaded:
        known = variants_of(loaded["still"])
        absent = sorted(set(options.variants) - set(known)) if options.variants != VARIANTS else []
        if absent:
            raise unknown(absent[0], known, f"{model}: --variants {absent[0]}")
        options = replace(options, variants=tuple(v for v in options.variants if v in known))
    setting = BenchOptions(threads=options.threads, provider=options.provider, runtime=options.runtime)
    measured = _measured(longest, packages, setting)
    advance = started(measurements([*loaded, *packages, *served], options) + len(packages))
    vocabulary, result = load_tokenizer(options.tokenizer or model), Evaluation()
    for name, package in packages.items():
        result.costs[name] = costs(package, measured, setting)
        advance(f"{name}, costs")
    result.add(measure(loaded, vocabulary, options, device=pick_device(options.device), advance=advance))
    for name, package in packages.items():  # one at a time saves memory
        opened = {name: open_model(package, setting)}
        result.add(measure(opened, vocabulary, options, advance=advance))
        del opened
    for address in served:
        result.add(measure({address: ServedModel(address, len(vocabulary))}, vocabulary, options, advance=advance))
    if output is not None:
        write_evaluation(result, options, output, command)
    return result


def _check_served(options: EvaluationOptions) -> None:
    """Raise ConfigError if a measurement needs logits of a server, or the tokenizer is not named."""
    if options.tokenizer is None:
        raise ConfigError("a server gets token ids: name the folder of its tokenizer with --tokenizer.")
    if options.texts and (options.context_lengths or options.by_position):
        raise ConfigError('a server does not return logits: leave out --by-position, and give --contexts "".')


def _packages(models: list[str], alone: bool) -> dict[str, Package]:
    """Packages by folder name; {} if there is one model, it is not a package, and `alone`."""
    folders = [Path(model) for model in models]
    if not all(map(is_package, folders)):
        if len(models) > 1 or not alone:
            raise ConfigError(
                f"{len(models)} models: several at once must be packages or servers. Evaluate each on its own."
            )
        return {}
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"packages named {', '.join(names)}: give folders of different names.")
    return {name: open_package(folder) for name, folder in zip(names, folders, strict=True)}


def _check_room(name: str, tokens: int, capacity: dict[str, Any]) -> None:
    if capacity["bounded"] and tokens > capacity["capacity_tokens"]:
        raise ConfigError(
            f"{name} has room for {capacity['capacity_tokens']} tokens; {tokens} are needed. Give smaller --lengths and --contexts."
        )


def _measured(tokens: int, packages: Mapping[str, Package], setting: BenchOptions) -> int:
    """`tokens`, reduced until every package has room for the timed steps as well."""
    bounds = [p.manifest["capacity"] for p in packages.values()]
    limits = (b["capacity_tokens"] - setting.room(0) for b in bounds if b["bounded"])
    return max(1, min((tokens, *limits)))
