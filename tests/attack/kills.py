"""Processes killed at moments drawn from a seed: nothing half, nothing left behind after the next run, the old folder intact."""

import hashlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import forks


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by name; without what the next run sweeps."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and ".staged" not in str(p.relative_to(folder)))
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def start(arguments: list[str]) -> int:
    """Run the command line in a forked process group; its process id."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _, write = os.pipe()
        forks.be_the_program(arguments, write)
    return child


def kill_after(arguments: list[str], seconds: float) -> bool:
    """Run, and kill after so long; whether it was still running."""
    child = start(arguments)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def attack(folder: Path, model: Path, seed: int, count: int, only: str | None = None) -> bool:
    """Kill each verb, or only this one, `count` times; print what was found wrong."""
    from damage import Inputs

    os.environ["XDG_CONFIG_HOME"] = str(folder / "configuration")
    forks.preload()
    inputs = Inputs(folder / "inputs", model)
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    package, linearized = work / "package", work / "linearized"
    export = ["export", str(inputs.model), "--to", "onnx", "-q", "-o", str(package)]
    apply = [
        "linearize",
        str(inputs.base),
        "--adapter",
        str(inputs.linearized / "adapter"),
        "-q",
        "-o",
        str(linearized),
    ]
    verify = ["verify", str(package), "--lengths", "1,9", "--decode-steps", "2", "-q"]
    verbs: dict[str, tuple[list[str], Path]] = {
        "export": (export, package),
        "export --force": ([*export, "--force"], package),
        "linearize": (apply, linearized),
        "linearize --force": ([*apply, "--force"], linearized),
        "verify": (verify, package / "verify"),
    }
    if only:
        verbs = {only: verbs[only]}
    found: Counter[str] = Counter()
    for verb, (command, target) in verbs.items():
        keeps = "--force" in verb
        if target.parent == work and not keeps:
            shutil.rmtree(target, ignore_errors=True)
        elif not package.exists():
            forks.run(export, 600)
        took = forks.run(command, 600).seconds
        before = digest(target)
        for number in range(count):
            rng = random.Random(f"{seed} {verb} {number}")
            if not keeps and target.parent == work:
                shutil.rmtree(target, ignore_errors=True)
            # The last moments, when folders are exchanged, matter most.
            moment = took * (rng.uniform(0.9, 1.02) if rng.randrange(2) else rng.uniform(0, 1))
            killed = kill_after(command, moment)
            found[f"{verb}: killed" if killed else f"{verb}: done before"] += 1
            took *= 1.03 if killed else 0.9  # the machine's load changes
            there = digest(target) if target.exists() else {}
            if keeps or there:
                # Manifests and reports hold times and paths: names and weights must be whole.
                whole = there.keys() == before.keys() and all(
                    there[n] == before[n]
                    for n in before
                    if n.endswith((".data", ".safetensors", "model.onnx", "tokenizer.json"))
                )
                found[f"{verb}: WRONG, half or lost"] += not whole
        forks.run(command if keeps or target.parent != work else [*command, "--force"], 600)
        left = [p.name for p in work.rglob(".*") if p.name.startswith(".")]
        found[f"{verb}: WRONG, left behind"] += len(left)
        print("; ".join(f"{what}: {n}" for what, n in found.items() if n and what.startswith(f"{verb}:")), flush=True)
    good = not any(number for what, number in found.items() if "WRONG" in what)
    print("kills: nothing half, nothing left behind" if good else "kills: FAILED")
    return good
