"""still-export evaluate: what a model knows, and what each part of STILL attention gives it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.output import Output, ReportFile, command_line, report_folder
from still_export.errors import ConfigError

if TYPE_CHECKING:
    from still_export.evaluation.bench import Setting
    from still_export.package.folder import Package

EXAMPLES = """
Examples:

    still-export evaluate MODEL --text held_out.txt -o evaluation

    still-export evaluate MODEL --teacher BASE --lengths 1024,4096 --tasks needle,passkey -o evaluation

    still-export evaluate MODEL --teacher BASE --text code.txt --tasks unseen --lengths 2048 --chat 50 -o evaluation

    still-export evaluate INT4 INT8 FLOAT32 --text held_out.txt --tasks needle --lengths 2048 -o which
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("evaluate", epilog=EXAMPLES)(evaluate)


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="STILL model folder, a softmax model, or packages, one or more.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for tables and plots.", show_default="MODEL/evaluation"),
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The softmax model that MODEL was made from.")] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text file for bits per byte and as filler; repeatable.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Context lengths for bits per byte.")] = "1024",
    by_position: Annotated[
        int, typer.Option(min=0, help="Perplexity by position in blocks of so many tokens of each text; 0 = none.")
    ] = 0,
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text at most.")] = 1 << 17,
    tasks: Annotated[
        str, typer.Option(help="Retrieval tasks: needle, passkey, key_value, unseen, code; empty: none.")
    ] = "needle,passkey,key_value",
    lengths: Annotated[str, typer.Option(help="Prompt lengths of retrieval.")] = "1024,2048,4096",
    depths: Annotated[int, typer.Option(min=1, help="Depths at which the fact is hidden.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each task, length and depth.")] = 4,
    chat: Annotated[
        int, typer.Option(min=0, help="Questions of a chat whose answers' ends are counted, at most 50.")
    ] = 0,
    variants: Annotated[str, typer.Option(help="Of a STILL model; default: all.", show_default=False)] = "",
    tokenizer: Annotated[str | None, typer.Option(help="Folder of the tokenizer, if not beside the model.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; a package runs where its runtime does.")] = "auto",
    runtime: Annotated[
        str | None, typer.Option(help="Of packages: ort, trt or torch.", show_default="the package's target")
    ] = None,
    provider: Annotated[str, typer.Option(help="Of ONNX Runtime: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Of packages; 0 = the runtime's choice.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure bits per byte and retrieval: teacher, STILL, and STILL without salient tokens, linear part, norm-preserving map.

    Of packages also size, memory and speed, so that one can be chosen.
    """
    from dataclasses import asdict, replace

    from still_export.doctor import machine
    from still_export.evaluation.bench import Setting
    from still_export.evaluation.evaluate import (
        UNSEEN,
        VARIANTS,
        Evaluation,
        EvaluationOptions,
        evaluate,
        load_any,
        measurements,
        pick_device,
        variants_of,
        write_evaluation,
    )
    from still_export.evaluation.packages import costs, open_model
    from still_export.models.load import load_tokenizer
    from still_export.report import evaluate as looks
    from still_export.report.render import check_report, write_report

    if report is not None:
        check_report(report)
    options = EvaluationOptions(
        texts=tuple(text or ()),
        context_lengths=_numbers("contexts", contexts),
        by_position=by_position,
        text_tokens=text_tokens,
        tasks=tuple(t for t in tasks.split(",") if t),
        lengths=_numbers("lengths", lengths),
        depths=depths,
        samples=samples,
        seed=seed,
        chat=chat,
        variants=tuple(v for v in variants.split(",") if v) or VARIANTS,
    )
    packages, model = _packages(models), models[0]
    asked = (*(options.lengths if options.tasks else ()), *(options.context_lengths if options.texts else ()))
    asked += (by_position,) if options.texts and by_position else ()
    longest = max(asked, default=2)
    if not asked and not chat:
        raise ConfigError("nothing to measure. Give --text, --tasks or --chat.")
    for name, package in packages.items():
        _check_room(name, longest, package.manifest["capacity"])
    writes = bool(chat) or UNSEEN in options.tasks
    loaded = load_any(None if packages else model, teacher, dtype, generates=writes, tokens=longest)
    if teacher is not None and not packages and "still" not in loaded:
        raise ConfigError(f"{model} is a softmax model; --teacher is for STILL models.")
    if "still" in loaded:
        known = variants_of(loaded["still"])
        absent = sorted(set(options.variants) - set(known)) if variants else []
        if absent:
            raise ConfigError(f"{model} has no layers for the variant {', '.join(absent)}; it has {', '.join(known)}.")
        options = replace(options, variants=tuple(v for v in options.variants if v in known))
    setting, folder = Setting(threads=threads, provider=provider), report_folder(output or Path(model) / "evaluation")
    measured = _measured(longest, packages, setting)
    out, vocabulary, result = Output(as_json, quiet), load_tokenizer(tokenizer or model), Evaluation()
    with out.bar("evaluating", measurements([*loaded, *packages], options) + len(packages)) as advance:
        for name, package in packages.items():
            result.costs[name] = costs(package, runtime, measured, setting)
            advance(f"{name}, costs")
        result.add(evaluate(loaded, vocabulary, options, device=pick_device(device), advance=advance))
        for name, package in packages.items():  # one at a time: memory
            opened = {name: open_model(package, runtime, setting)}
            result.add(evaluate(opened, vocabulary, options, advance=advance))
            del opened
    write_evaluation(result, options, folder, command_line())
    if report is not None:
        write_report(looks.page(asdict(result), model, depths, machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    out.result({"folder": str(folder), **asdict(result)}, result.table(), f"tables and plots: {folder}")


def _packages(models: list[str]) -> dict[str, Package]:
    """The packages by their folders' names; empty for one model that is none.

    Raises:
        ConfigError: Several are given and not all are packages, or two have one name.
    """
    from still_export.package.folder import is_package, open_package

    folders = [Path(model) for model in models]
    if not all(map(is_package, folders)):
        if len(models) > 1:
            raise ConfigError(f"{len(models)} models: several at once are packages. Evaluate each on its own.")
        return {}
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"packages named {', '.join(names)}: give folders of different names.")
    return {name: open_package(folder) for name, folder in zip(names, folders, strict=True)}


def _check_room(name: str, tokens: int, capacity: dict[str, Any]) -> None:
    if capacity["bounded"] and tokens > capacity["capacity_tokens"]:
        raise ConfigError(
            f"{name} holds {capacity['capacity_tokens']} tokens; {tokens} were asked for. Give smaller --lengths and --contexts."
        )


def _measured(tokens: int, packages: Mapping[str, Package], setting: Setting) -> int:
    """Of `tokens` what leaves every package room for the steps that are timed behind them."""
    bounds = [p.manifest["capacity"] for p in packages.values()]
    held = (b["capacity_tokens"] - setting.room(0) for b in bounds if b["bounded"])
    return max(1, min((tokens, *held)))


def _numbers(name: str, given: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in given.split(",") if n)
    except ValueError:
        raise ConfigError(f"--{name} {given}: give numbers separated by commas, such as 1024,4096.") from None
