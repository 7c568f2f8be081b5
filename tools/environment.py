"""Install this package with extras into the environment of the Python that runs this, at the versions of constraints.txt.

usage, from the root: .venv/bin/python tools/environment.py EXTRAS [PACKAGES COMMAND...]

EXTRAS are names of pyproject.toml, separated by commas. COMMAND needs PACKAGES alone, and runs beside the rest of the installation.
Standard library only.
"""

import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from with_dots import run

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = Path(".venv/.installed")
# Modules are compiled when they are first imported: pip would compile all of every package, half a minute for what is never used.
PIP = (sys.executable, "-m", "pip", "install", "-q", "--no-compile")


def requirements(project: dict, extras: list[str]) -> set[str]:
    """What `extras` need, those of other extras included."""
    found, known = set(project["dependencies"]), project["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            sys.exit(f"tools/env.sh: there is no extra {extra!r}; known: {', '.join(known)}")
        for each in known[extra]:
            own = each.startswith(f"{project['name']}[")
            found |= requirements(project, each.split("[")[1].rstrip("]").split(",")) if own else {each}
    return found


def install(what: str, *words: str, otherwise: str = "") -> bool:
    """Whether pip installed it; the end where it must."""
    # The constraints are those of the Python that CI runs; others resolve the ranges of pyproject.toml.
    pinned = ("-c", "constraints.txt") if sys.version_info[:2] == (3, 11) else ()
    code = run(what, *PIP, *pinned, *words, otherwise=otherwise)
    if code and not otherwise:
        sys.exit(code)
    return code == 0


def install_torch() -> None:
    """torch alone and first: packages that depend on it must find it, not choose a build of their own. Its CUDA build takes 6 GB on disk,
    of no use without a driver; that for CPUs is on PyTorch's own index alone."""
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        install("installing PyTorch, the usual build, since an NVIDIA driver is here", "torch")
        return
    own_index = ("--timeout", "5", "--retries", "0", "--index-url", TORCH_INDEX)
    other = f"not from {TORCH_INDEX}, which cannot be reached: from the usual index"
    if not install("installing PyTorch, the build for CPUs", *own_index, "torch", otherwise=other):
        install("installing PyTorch", "torch")


def main(extras: str, beside: str = "", *command: str) -> None:
    """Install what is missing."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = requirements(project, extras.split(","))
    made_of = [project[part] for part in ("name", "scripts", "entry-points")]
    files = [
        Path(name).read_text(encoding="utf-8") for name in ("setup.py", "constraints.txt", "still_export/version.py")
    ]
    key = hashlib.sha256(json.dumps([*made_of, *files]).encode()).hexdigest()
    stamp = set(STAMP.read_text(encoding="utf-8").splitlines()) if STAMP.exists() else set()
    if {key, *wanted} <= stamp:
        return
    if command:
        install(f"installing {beside}", *shlex.split(beside))
        quiet = subprocess.DEVNULL
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=lambda: os.nice(5))
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        install_torch()
    install(f"installing still-export[{extras}]", "-e", f".[{extras}]")
    kept = stamp if key in stamp else set()
    STAMP.write_text("\n".join(sorted({key, *wanted, *kept})) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
