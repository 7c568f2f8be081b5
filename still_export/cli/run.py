"""still-export run: text from a package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output, TrustNative
from still_export.errors import ConfigError, PackageError

EXAMPLES = """
Examples:

    still-export run package --prompt "Once upon a time" --tokens 64

    still-export run package --chat --temperature 0.7 --top-p 0.9 --seed 1

    still-export run package --prompt-file long.txt --tokens 100
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("run", epilog=EXAMPLES)(run)


def run(
    package: Annotated[Path, typer.Argument(help="Package folder.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue; with --chat the first message.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, separated by commas.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat format; without a prompt, talk.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of a chat.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="0 = ONNX Runtime's choice.")] = 0,
    provider: Annotated[str, typer.Option(help="Of ONNX Runtime: cpu or cuda.")] = "cpu",
    runtime: Annotated[str | None, typer.Option(help="ort, trt or torch.", show_default="the package's target")] = None,
    plugin: Annotated[Path | None, typer.Option(help="trt: plugin library in the place of the package's.")] = None,
    trust_native: TrustNative = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare the weights with their hashes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print tokens, text and timings as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No timings on stderr.")] = False,
) -> None:
    """Continue a prompt, or chat, with ONNX Runtime or TensorRT; prompts of any length are fed in pieces."""
    from still_export.package.folder import open_package
    from still_export.package.trust import trust_package
    from still_export.runners.cuda_driver import CudaError
    from still_export.runners.opening import open_runner, runtime_of
    from still_export.runners.sampling import RunError, Sampling
    from still_export.runners.text import Text, stream_answer, token_ids
    from still_export.runners.text import chat as talk

    if sum(x is not None for x in (prompt, prompt_file, prompt_ids)) + int(chat and prompt is None) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --prompt-file, --prompt-ids, --chat")
    manifest = open_package(
        package, check_hashes=False
    ).manifest  # the runner compares them, the weights' while it loads them
    runtime = runtime_of(manifest["target"], runtime)
    out = Output(as_json, quiet)
    if not check:
        print("--no-check: damaged weights go unnoticed", file=sys.stderr)
    try:
        if trust_native:
            trust_package(package)
        sampling = Sampling(temperature, top_k, top_p, seed)
        model = open_runner(package, manifest, runtime, provider, threads, plugin, check)
        model.start()
        if prompt_ids is not None:
            try:
                ids = token_ids(prompt_ids)
            except ValueError:
                raise ConfigError(f"--prompt-ids {prompt_ids}: give numbers separated by commas.") from None
            text = None
        else:
            text = Text(model)
            if prompt is None and prompt_file is None:
                talk(model, text, tokens, sampling, system)
                return
            content = prompt if prompt_file is None else _read(prompt_file)
            ids = text.turn(content or "", True, system) if chat else text.encode(content or "")
        stream = None if as_json else sys.stdout
        with out.reading(len(ids)) as progress:
            answer = stream_answer(model, text, ids, tokens, sampling, stream, progress)
    except (RunError, CudaError) as error:
        raise PackageError(str(error)) from error
    if as_json:
        print(json.dumps(answer))
    out.log(
        f"[{answer['prompt_tokens']} prompt tokens, first token after {answer['first_token_s']:.2f} s, "
        f"{answer['decode_tokens_per_s']:.1f} tokens/s]"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}.") from error
