"""Servers killed while they start, answer, write states and stop: the next one answers as before, and nothing is left behind."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import forks
import psutil

STATES = 2 << 20
"""Bytes of kept states: room for a few, so that they are evicted, too."""
TOKENS = 12


def start(package: Path, work: Path, wait: bool = True) -> tuple[subprocess.Popen[str], int]:
    """(a server, its port; 0 where it is not waited for)."""
    command = [
        sys.executable,
        "-m",
        "still_export.cli.main",
        "serve",
        str(package),
        "--port",
        "0",
        "--name",
        "attacked",
    ]
    command += [
        "--threads",
        "1",
        "--prefix-dir",
        str(work / "states"),
        "--prefix-cache",
        str(STATES),
        "--stop-timeout",
        "5",
    ]
    environment = {**os.environ, "TMPDIR": str(work / "temporary")}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    if not wait:
        return server, 0
    said = ""
    for line in server.stderr:
        said += line
        if found := re.search(r" on http://[\d.]+:(\d+)/v1", line):
            return server, int(found[1])
    raise RuntimeError(f"the server did not start: {said}")


def ask(port: int, body: dict[str, Any], path: str = "completions") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "attacked", "temperature": 0, "max_tokens": TOKENS, **body}
    connection.request("POST", f"/v1/{path}", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return json.loads(text) if response.status == 200 and not body.get("stream") else text


def keep_asking(port: int, prompts: list[str], draw: random.Random) -> threading.Thread:
    """Ask until nobody answers."""

    def work() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while True:
                prompt = draw.choice(prompts)
                if draw.random() < 0.3:
                    ask(port, {"prompt": prompt}, "prefixes")
                else:
                    ask(port, {"prompt": prompt, "stream": draw.random() < 0.5})

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def attack(folder: Path, model: Path, seed: int, count: int) -> bool:
    """Kill a server `count` times; print what was found wrong."""
    draw, package = random.Random(seed), folder / "package"
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    if not package.exists():
        forks.run(["export", str(model), "--to", "onnx", "-q", "-o", str(package)], 600)
    prompts = [f"{number} " + "The boat left the harbour. " * draw.randrange(1, 12) for number in range(8)]
    wrong: list[str] = []
    wanted: dict[str, Any] = {}
    for number in range(count + 1):
        begin = time.monotonic()
        server, port = start(package, folder)
        took = time.monotonic() - begin
        for prompt in prompts:
            found = ask(port, {"prompt": prompt})["choices"][0]["text"]
            if found != wanted.setdefault(prompt, found):
                wrong.append(f"another answer after {number} kills: {found!r}, not {wanted[prompt]!r}")
        with contextlib.suppress(OSError):  # a template's process starts with the first chat
            ask(port, {"messages": [{"role": "user", "content": "a"}]}, "chat/completions")
        if number == count:
            break
        users = [keep_asking(port, prompts, random.Random(draw.random())) for _ in range(3)]
        time.sleep(draw.uniform(0, 0.6))
        children = psutil.Process(server.pid).children(recursive=True)
        if number % 3 == 1:
            server.send_signal(signal.SIGTERM)  # killed while it stops
            time.sleep(draw.uniform(0, 0.2))
        server.kill()
        server.wait()
        for user in users:
            user.join(30)
        _, alive = psutil.wait_procs(children, 5)
        wrong += [f"process left behind: {' '.join(child.cmdline())}" for child in alive]
        if number % 3 == 2:
            starting, _ = start(package, folder, wait=False)
            time.sleep(draw.uniform(0, took))
            starting.kill()
            starting.wait()
    server.send_signal(signal.SIGTERM)
    if (code := server.wait(30)) != 0:
        wrong.append(f"exit code {code}")
    states = list((folder / "states").iterdir())
    wrong += [f"left behind: {path.name}" for path in states if path.suffix != ".safetensors"]
    wrong += [f"left behind: {path}" for path in (folder / "temporary").iterdir()]
    if not 0 < (size := sum(path.stat().st_size for path in states)) <= STATES:
        wrong.append(f"{len(states)} states of {size} bytes")
    print("\n".join([*wrong, f"serve: {count} kills, {len(states)} states, {'FAILED' if wrong else 'nothing wrong'}"]))
    return not wrong
