"""What tools/release.sh runs of an installed still-export, with the standard library alone.

python tools/release_trial.py audit WHEEL REPORT   # WHEEL runs where its name says: REPORT is what `auditwheel show` printed
python tools/release_trial.py try MODEL WORK       # export, run, serve and verify MODEL by the still-export of this interpreter
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

PROMPT, TOKENS = "The passage of the act", 9


def audit(wheel: str, report: str) -> None:
    """Raise SystemExit unless auditwheel finds `wheel` consistent with the tag in its name."""
    tag = wheel.removesuffix(".whl").rpartition("-")[2]
    found = re.search(r'consistent with the following platform tag:\s*"([^"]+)"', Path(report).read_text())
    glibc = [
        int(re.search(r"manylinux_2_(\d+)_", name)[1]) for name in (found[1] if found else "manylinux_2_999_", tag)
    ]  # type: ignore[index]
    if glibc[0] > glibc[1]:
        raise SystemExit(f"{wheel}: auditwheel finds {found and found[1]}, not {tag}")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "still_export.cli.main", *arguments]


def ran(words: list[str]) -> str:
    """Standard output of a command, which must succeed; no compiler is on its path."""
    done = subprocess.run(words, env=environment(), text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{words} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"STILL_BUILD_KERNELS": "0", "XDG_CACHE_HOME": str(Path(sys.argv[3], "cache"))}


def attempt(model: str, work: str) -> None:
    """Export MODEL into WORK by the installed package, and use the package in all ways."""
    import still_export_kernels

    import still_export

    for module in (still_export, still_export_kernels):
        if (
            module.__version__ != still_export.__version__
            or Path(module.__file__).parents[1].joinpath("setup.py").exists()
        ):
            raise SystemExit(f"{module.__file__} {module.__version__} is not what was installed")
    Path(work).mkdir(parents=True)
    package = str(Path(work, "package"))
    ran(command("export", model, "--to", "onnx", "-o", package, "--quiet"))
    manifest = json.loads(Path(package, "manifest.json").read_text())
    library = manifest["native"]["library"]
    if manifest["files"][library]["sha256"] != still_export_kernels.BUILD["sha256"]:
        raise SystemExit(f"{package}/{library} is not the library of still-export-kernels")
    ways = {
        "run": command("run", package, "--prompt", PROMPT, "--tokens", str(TOKENS)),
        "run_ort.py": [sys.executable, f"{package}/run_ort.py", "--prompt", PROMPT, "--tokens", str(TOKENS)],
    }
    said = {way: ran(words).rstrip("\n") for way, words in ways.items()}
    said["serve"] = served(package)
    if len(set(said.values())) != 1 or not said["run"].strip():
        raise SystemExit(f"answers differ: {said}")
    print(f"run, run_ort.py, serve: {said['run']!r}")
    print(
        *[
            line
            for line in ran(command("verify", package, "--quick", "--quiet")).splitlines()
            if line.startswith("PASSED")
        ]
    )


def served(package: str) -> str:
    """The answer of a server to PROMPT."""
    words = command("serve", package, "--port", "0")
    server = subprocess.Popen(words, env=environment(), text=True, stderr=subprocess.PIPE)
    assert server.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"(http://\S+)/v1", said)):
            line = server.stderr.readline()
            if not line:
                raise SystemExit(f"{words} ended: {said}")
            said += line
        body = {"model": "package", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(json.load(answer)["choices"][0]["text"]).rstrip("\n")
    finally:
        server.terminate()
        server.communicate(timeout=120)


if __name__ == "__main__":
    {"audit": audit, "try": attempt}[sys.argv[1]](*sys.argv[2:])
