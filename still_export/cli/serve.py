"""still-export serve: a package behind an OpenAI-compatible interface."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.output import Output, PackageFolder, TrustNative
from still_export.errors import ConfigError, PackageError
from still_export.extras import demand
from still_export.folders.sources import demand_package
from still_export.options import options_of

if TYPE_CHECKING:
    from still_export.serving.app import Settings

EXAMPLES = """
Examples:

    still-export serve package

    STILL_API_KEY=secret still-export serve package --host 0.0.0.0 --rows 8 --max-context 16384
"""


def serve(
    flags: dict[str, Any],
    package: PackageFolder,
    trust_native: TrustNative = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")] = False,
) -> None:
    """Serve a package with OpenAI's interface: chats and completions, many at a time, streamed or whole."""
    demand("starlette", "uvicorn")
    demand_package(package, "serve")
    from still_export.api import load
    from still_export.cli.gguf_package import package_of
    from still_export.runtime.cuda_driver import CudaError
    from still_export.runtime.options import LoadOptions
    from still_export.runtime.ort import OrtModel
    from still_export.runtime.prefix_folder import open_prefixes
    from still_export.runtime.sampling import RunError
    from still_export.serving.app import Settings
    from still_export.serving.options import ServeOptions
    from still_export.serving.scheduler import Scheduler
    from still_export.serving.server import Server, is_local, listen
    from still_export.serving.worker import Worker

    out = Output(False, quiet)
    options, opening = ServeOptions(**options_of(ServeOptions, flags)), options_of(LoadOptions, flags)
    if options.reproducible and opening.get("guess") not in (None, "none"):
        raise ConfigError(
            "--reproducible and --guess exclude each other: guessed tokens change the pieces that are read. Leave one of them out."
        )
    name = options.name or os.path.basename(os.path.abspath(package)).removesuffix(".gguf")
    package = package_of(package, out)

    def open_scheduler() -> Scheduler:
        model = load(package, trust_native=trust_native, **opening)
        if "tokenizer.json" not in model.runner.manifest["files"]:
            raise RunError(
                f"{package} has no tokenizer.json, so it cannot be served: answers are text. Export a model with a tokenizer."
            )
        host_memory = isinstance(model.runner, OrtModel) and model.runner.device == "cpu"
        size = options.prefix_cache or ("1GiB" if host_memory else "0")
        prefixes = open_prefixes(model.runner, size, options.prefix_dir, options.reproducible)
        return Scheduler(
            model.runner,
            model.text,
            options.rows,
            options.max_queue,
            options.max_context,
            options.piece_tokens,
            prefixes,
            options.reproducible,
        )

    with listen(options.host, options.port) as sock:
        try:
            with out.waiting(f"opening {package}"):
                worker = Worker(open_scheduler)
        except (RunError, CudaError) as error:
            raise PackageError(str(error)) from error
        scheduler = worker.scheduler
        body_bytes = 1024 * options.max_body_kb if options.max_body_kb else (64 << 10) + 64 * scheduler.context
        local = is_local(sock)
        named = options.allowed_host
        hosts = frozenset(map(str.lower, [options.host, *named])) if local or named else None
        shared = local and options.api_key is None
        settings = Settings(
            name, options.api_key, body_bytes, hosts=hosts, origins=options.allowed_origin, shared=shared
        )
        size = scheduler.state_bytes(scheduler.context) / 1e6
        where = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{where}:{sock.getsockname()[1]}"
        out.log(
            f"{settings.name} on {url}/v1: {options.rows} rows of {scheduler.context:,} tokens, whose state needs {size:,.0f} MB at most"
        )
        out.log(f"chat in a browser: {url}/\n{_curl(url, settings, bool(scheduler.text.chat))}")
        if options.api_key is None and not local:
            print(
                f"warning: anyone who can reach {where} can use this server: set a key in STILL_API_KEY",
                file=sys.stderr,
            )
        Server(worker, settings, options.stop_timeout).run(sockets=[sock])
        if worker.failure is not None:
            raise PackageError(str(worker.failure)) from worker.failure
        out.log("stopped")
        worker.join(5)
        if scheduler.prefixes is not None:
            scheduler.prefixes.close()


def _curl(url: str, settings: Settings, chat: bool) -> str:
    """A shell command that tries the server."""
    path, request = "completions", dict[str, Any](prompt="Once upon a time")
    if chat:
        path, request = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body = json.dumps({"model": settings.name, **request, "max_tokens": 64})
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $STILL_API_KEY"'
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
