"""still-export kernels: the library of kernels for CPUs; exports include it once it is built."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output


def register(app: typer.Typer, panel: str) -> None:
    kernels = typer.Typer(help="Build the kernels for CPUs once; later exports include them.", no_args_is_help=True)
    kernels.command("build")(build)
    kernels.command("headers")(headers)
    kernels.command("flags")(flags)
    app.add_typer(kernels, name="kernels", rich_help_panel=panel)


def build(
    cpu: Annotated[
        str | None,
        typer.Option(help="Target CPU: x86_64 or aarch64, by a cross compiler.", show_default="this machine's"),
    ] = None,
    onnxruntime_include: Annotated[
        Path | None,
        typer.Option(help="Folder of onnxruntime_c_api.h.", show_default="the usual places, else fetched"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Build the kernels (cmake, g++, one to three minutes) unless still-export-kernels or the cache has them; print the library's path."""
    from still_export.errors import unknown
    from still_export.targets.ort.library import CPUS, build_library

    if cpu not in (None, *CPUS):
        raise unknown(cpu, CPUS, f"--cpu {cpu}")
    with Output(False, quiet).steps() as progress:
        progress("building the kernels")
        library = build_library(cpu, onnxruntime_include)
    print(library)


def headers() -> None:
    """Fetch ONNX Runtime's C headers from Debian's libonnxruntime-dev into the cache (no wheel has them); print their folder."""
    from still_export.targets.ort.headers import fetch_headers

    print(fetch_headers())


def flags(
    genai: Annotated[bool, typer.Option("--genai", help="For a program over onnxruntime-genai.")] = False,
    onnxruntime: Annotated[
        str,
        typer.Option(
            help="Folder of ONNX Runtime's release where the program is compiled, which may be another machine."
        ),
    ] = "",
) -> None:
    """Print the flags that a C++ program over ONNX Runtime is compiled with: g++ program.cpp $(still-export kernels flags)."""
    from still_export.targets.ort.headers import compiler_flags, release_flags

    print(shlex.join(release_flags(onnxruntime) if onnxruntime else compiler_flags(genai)))
