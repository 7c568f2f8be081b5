"""still-export serve: a package behind OpenAI's interface."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.output import Output, PackageFolder, TrustNative
from still_export.errors import ConfigError, PackageError
from still_export.extras import demand
from still_export.sources import demand_package

if TYPE_CHECKING:
    from still_export.serving.app import Settings

EXAMPLES = """
Examples:

    still-export serve package

    STILL_API_KEY=secret still-export serve package --host 0.0.0.0 --rows 8 --max-context 16384
"""


def serve(
    asked: dict[str, Any],
    package: PackageFolder,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 = every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests.", show_default="the folder's name")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="STILL_API_KEY", help="Asked of every request to /v1.", show_default="none")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which requests may ask for the server, beside localhost and addresses; repeatable.",
            show_default="only these on this machine's own address, else any",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=1024, help="Requests that run at the same time.")] = 4,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that wait; more are refused with 429.")] = 64,
    max_context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a prompt and its answer.", show_default="the package's capacity"),
    ] = None,
    max_body_kb: Annotated[
        int | None, typer.Option(min=1, help="Of a request.", show_default="64, and 64 bytes a token of the context")
    ] = None,
    piece_tokens: Annotated[
        int, typer.Option(min=1, help="Of a prompt, read between two tokens of the other answers.")
    ] = 256,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory for states of prompts and answers, which are not read again; 0 = none.",
            show_default="1GiB on a CPU, 0 on a GPU",
        ),
    ] = None,
    prefix_dir: Annotated[
        Path | None, typer.Option(help="Folder in which they outlive the server; as large as the cache at most.")
    ] = None,
    reproducible: Annotated[
        bool,
        typer.Option(
            "--reproducible",
            help="Answers are the same to the last bit alone and among others, in one piece or many, cold or behind kept states.",
        ),
    ] = False,
    stop_timeout: Annotated[int, typer.Option(min=0, help="Seconds that SIGTERM leaves to what runs.")] = 30,
    trust_native: TrustNative = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors alone on stderr.")] = False,
) -> None:
    """Serve a package by OpenAI's interface: chats and texts, many at a time, streamed or whole."""
    demand_package(package, "serve")
    demand("starlette", "uvicorn")
    from still_export.api import load
    from still_export.cli.gguf_package import package_of
    from still_export.runtime.cuda_driver import CudaError
    from still_export.runtime.ort import OrtModel
    from still_export.runtime.prefix_folder import open_prefixes
    from still_export.runtime.sampling import RunError
    from still_export.serving.app import Settings
    from still_export.serving.scheduler import Scheduler
    from still_export.serving.server import Server, is_local, listen
    from still_export.serving.worker import Worker

    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key (or STILL_API_KEY) is empty: give a key, or leave it out.")
    out = Output(False, quiet)
    if reproducible and asked.get("guess") not in (None, "none"):
        raise ConfigError(
            "--reproducible and --guess do not go together: guessed tokens are read in other pieces. Leave one of them out."
        )
    name = name or os.path.basename(os.path.abspath(package)).removesuffix(".gguf")
    package = package_of(package, out)

    def open_scheduler() -> Scheduler:
        model = load(package, trust_native=trust_native, **asked)
        if "tokenizer.json" not in model.runner.manifest["files"]:
            raise RunError(
                f"{package} has no tokenizer.json, so it cannot be served: answers are text. Export a model with a tokenizer."
            )
        host_memory = isinstance(model.runner, OrtModel) and model.runner.device == "cpu"
        size = prefix_cache or ("1GiB" if host_memory else "0")
        prefixes = open_prefixes(model.runner, size, prefix_dir, reproducible)
        return Scheduler(model.runner, model.text, rows, max_queue, max_context, piece_tokens, prefixes, reproducible)

    with listen(host, port) as sock:
        try:
            with out.waiting(f"opening {package}"):
                worker = Worker(open_scheduler)
        except (RunError, CudaError) as error:
            raise PackageError(str(error)) from error
        scheduler = worker.scheduler
        body_bytes = 1024 * max_body_kb if max_body_kb else (64 << 10) + 64 * scheduler.context
        local = is_local(sock)
        hosts = frozenset(map(str.lower, [host, *(allowed_host or ())])) if local or allowed_host else None
        settings = Settings(name, api_key, body_bytes, hosts)
        size = scheduler.state_bytes(scheduler.context) / 1e6
        where = f"[{host}]" if ":" in host else host
        url = f"http://{where}:{sock.getsockname()[1]}"
        out.log(
            f"{settings.name} on {url}/v1: {rows} rows of {scheduler.context:,} tokens, whose state needs {size:,.0f} MB at most"
        )
        out.log(f"chat in a browser: {url}/\n{_curl(url, settings, bool(scheduler.text.chat))}")
        if api_key is None and not local:
            print(
                f"warning: everyone who reaches {where} can use this server: set a key in STILL_API_KEY",
                file=sys.stderr,
            )
        Server(worker, settings, stop_timeout).run(sockets=[sock])
        if worker.failure is not None:
            raise PackageError(str(worker.failure)) from worker.failure
        out.log("stopped")
        worker.join(5)
        if scheduler.prefixes is not None:
            scheduler.prefixes.close()


def _curl(url: str, settings: Settings, chat: bool) -> str:
    """A request to try the server with, as a line of a shell."""
    path, asked = "completions", dict[str, Any](prompt="Once upon a time")
    if chat:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body = json.dumps({"model": settings.name, **asked, "max_tokens": 64})
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $STILL_API_KEY"'
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
