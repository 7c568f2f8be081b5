"""Run a command that may say nothing for long: what it does, a dot every two seconds, and how long it took.

usage: python tools/with_dots.py [--else WORDS] WHAT COMMAND...      --else: said in the place of its errors, where it may fail
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterable


def run(what: str, *command: str, otherwise: str = "") -> int:
    """Run `command` with dots on stderr; the exit code. `otherwise` replaces what it prints if it fails."""
    begin = time.monotonic()
    print(what, end=" ", file=sys.stderr, flush=True)
    errors = subprocess.DEVNULL if otherwise else subprocess.PIPE
    with subprocess.Popen(command, stderr=errors, text=True, errors="replace") as process:
        relay = threading.Thread(target=_relay, args=(process.stderr or (),))
        relay.start()
        while True:
            try:
                code = process.wait(2)
                break
            except subprocess.TimeoutExpired:
                print(".", end="", file=sys.stderr, flush=True)
            except KeyboardInterrupt:  # which the command has got, too
                code = process.wait()
                break
        relay.join()
    print(f" {time.monotonic() - begin:.0f} s" if code == 0 else f" {otherwise or 'failed'}", file=sys.stderr)
    return code


def _relay(lines: Iterable[str]) -> None:
    """Print lines of the command behind the line of dots."""
    for number, line in enumerate(lines):
        print("" if number else "\n", line, sep="", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    otherwise = words[1] if words[0] == "--else" else ""
    what, *command = words[2:] if otherwise else words
    sys.exit(run(what, *command, otherwise=otherwise))
