"""still-export run: text from a package."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output, TrustNative, report_folder
from still_export.errors import ConfigError, PackageError
from still_export.folders.sources import demand_package
from still_export.options import options_of
from still_export.texts.files import read_text

EXAMPLES = """
Examples:

    still-export run package --prompt "Once upon a time" --tokens 64

    still-export run package --chat --temperature 0.7 --top-p 0.9 --seed 1

    cat long.txt | still-export run package --tokens 100

A long text is read once and asked many times:

    still-export run package --chat --prompt-file long.txt --save-state long.safetensors

    still-export run package --chat --load-state long.safetensors --prompt " Who wrote this?"
"""

TOKENS, TALK_TOKENS = 128, 512
"""Tokens of an answer without --tokens: of a single one, and of each in a chat."""


def run(
    flags: dict[str, Any],
    package: Annotated[Path, typer.Argument(help="Package folder, or a GGUF file, which is exported once.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue, or with --chat the first message; - reads standard input.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with that text; - reads standard input.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, separated by commas.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the model's chat format; without a prompt, chat interactively.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of a chat.")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="Arguments of the model's chat template, as JSON: '{\"enable_thinking\": false}'."),
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option(help="Read the prompt, write the state into this file, and stop.")
    ] = None,
    load_state: Annotated[Path | None, typer.Option(help="Continue from a state that --save-state wrote.")] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="LoRA adapter to add to the weights of a package exported with --adapters."),
    ] = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print tokens, text and timings as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No timings on stderr.")] = False,
) -> None:
    """Continue a prompt, or chat, with ONNX Runtime or TensorRT; prompts of any length are fed in pieces."""
    demand_package(package, "run")
    from still_export.api import load
    from still_export.cli.chat import ENDS, answer_stream, talk
    from still_export.cli.gguf_package import package_of
    from still_export.runtime.conversation import Conversation
    from still_export.runtime.cuda_driver import CudaError
    from still_export.runtime.options import AnswerOptions, LoadOptions
    from still_export.runtime.prefix_folder import cache_bytes, open_prefixes
    from still_export.runtime.sampling import RunError, Sampling
    from still_export.runtime.snapshot import Snapshot
    from still_export.runtime.text import write_answer

    prompts = [x for x in (prompt, prompt_file, prompt_ids) if x is not None]
    if not prompts and not chat and not sys.stdin.isatty():
        prompt = "-"
        prompts.append(prompt)
    if len(prompts) > 1 or not (prompts or chat) or (chat and prompt_ids is not None):
        raise ConfigError(
            f"give one of --prompt, --prompt-file, --prompt-ids, --chat, or a text on standard input. Type: still-export run "
            f'{shlex.quote(str(package))} --prompt "..."'
        )
    if not chat and (system is not None or chat_template_kwargs is not None):
        raise ConfigError(
            f"--system and --chat-template-kwargs are for the model's chat format. Type: still-export run "
            f'{shlex.quote(str(package))} --chat --prompt "..."'
        )
    if as_json and (save_state or not prompts):
        raise ConfigError("--json prints one answer. Give --prompt without --save-state, or leave out --json.")
    options, opening = AnswerOptions(**options_of(AnswerOptions, flags)), options_of(LoadOptions, flags)
    try:
        sampling = Sampling(**options_of(Sampling, flags))
    except RunError as error:
        raise ConfigError(str(error)) from None
    schema = _schema(options.json_schema)
    if schema is not None and not prompts:
        raise ConfigError("--json-schema is the form of one answer. Give --prompt, or leave it out.")
    if save_state and not prompts:
        raise ConfigError("--save-state saves the state after a prompt: give --prompt or --prompt-file.")
    if save_state:
        report_folder(save_state.parent)
        if save_state.is_dir():
            raise ConfigError(
                f"--save-state {save_state} is a folder. Name a file, such as {save_state / 'state.safetensors'}."
            )
    cache_bytes(options.prefix_cache)
    arguments = _arguments(chat_template_kwargs)
    if adapter is not None:
        from still_export.folders.model import check_overlay

        check_overlay(adapter)
    out = Output(as_json, quiet)
    package = package_of(package, out)
    if not opening.get("check", True):
        print("--no-check: damaged weights are not detected", file=sys.stderr)
    try:
        with out.waiting(f"opening {package}"):
            model = load(package, trust_native=trust_native, adapter=adapter, **opening)
        prefix = Snapshot.load(load_state) if load_state else None
        if not prompts:
            cache = open_prefixes(model.runner, options.prefix_cache, options.prefix_dir)
            most, table = options.tokens or TALK_TOKENS, model.runner.table
            if options.tokens is None and table.bounded:
                most = max(1, min(most, table.capacity_tokens // 4))
            talk(
                Conversation(model.runner, model.text, most, sampling, system, options.stop, prefix, cache, arguments),
                out,
                options.when_full,
            )
            if cache is not None:
                cache.close()
            return
        model.restore(prefix)
        content = prompt or ""
        if prompt_file:
            content = read_text(prompt_file)
        elif prompt == "-":
            content = sys.stdin.read().removeprefix("\ufeff")
        if not content and prompt_ids is None and prefix is None:
            raise ConfigError(f'the prompt is empty. Type: still-export run {shlex.quote(str(package))} --prompt "..."')
        with out.reading(len(content) // 4) as progress:
            if save_state:
                snapshot = model.read(
                    _ids(prompt_ids) or content,
                    chat=chat,
                    system=system,
                    chat_template_kwargs=arguments,
                    progress=progress,
                )
                snapshot.save(save_state)
                out.log(f"[{snapshot.length} tokens read into {save_state}, {save_state.stat().st_size / 1e6:.1f} MB]")
                return
            messages = [{"role": "user", "content": content}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            request = _ids(prompt_ids) or (messages if chat else content)
            answer = model.answer(
                request,
                options.tokens or TOKENS,
                sampling,
                options.stop,
                as_text=prompt_ids is None or (as_json and "tokenizer.json" in model.runner.manifest["files"]),
                progress=progress,
                chat_template_kwargs=arguments,
                response_format=schema,
            )
            write_answer(answer, None if as_json else answer_stream())
    except (RunError, CudaError) as error:
        raise PackageError(str(error)) from error

    if as_json:
        print(json.dumps(answer.to_dict()))
    out.log(
        f"[{answer.prompt_tokens} prompt tokens, first token after {answer.first_token_s:.2f} s, "
        f"{answer.decode_tokens_per_s:.1f} tokens/s, {len(answer.tokens)} tokens, ended by {ENDS[answer.ended]}]"
    )


def _ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    from still_export.runtime.text import token_ids

    try:
        return token_ids(text)
    except ValueError:
        raise ConfigError(f"--prompt-ids {text}: give numbers separated by commas.") from None


def _schema(text: str | None) -> dict[str, Any] | None:
    """The response_format of a JSON Schema, in a file or in `text`."""
    if text is None:
        return None
    try:
        schema = json.loads(text if text.lstrip().startswith("{") else read_text(Path(text)))
    except ValueError as error:
        raise ConfigError(f"--json-schema {text:.60}: not JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise ConfigError(f'--json-schema {text:.60}: give an object, such as \'{{"type": "object"}}\'.')
    return {"type": "json_schema", "json_schema": {"schema": schema or {"type": "object"}}}


def _arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs {text:.60}: not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--chat-template-kwargs {text:.60}: give an object, as '{{\"enable_thinking\": false}}'.")
    return found
