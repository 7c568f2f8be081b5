"""Run a command that may say nothing for long: what it does, a dot every two seconds, and how long it took.

usage: python tools/with_dots.py [--else WORDS] WHAT COMMAND...      --else: said in the place of its errors, where it may fail
"""

import subprocess
import sys
import time


def run(what: str, *command: str, otherwise: str = "") -> int:
    """Run `command` with dots on stderr; the exit code. `otherwise` replaces what it prints if it fails."""
    begin = time.monotonic()
    print(what, end=" ", file=sys.stderr, flush=True)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL if otherwise else None) as process:
        while True:
            try:
                code = process.wait(2)
                break
            except subprocess.TimeoutExpired:
                print(".", end="", file=sys.stderr, flush=True)
            except KeyboardInterrupt:  # which the command has got, too
                code = process.wait()
                break
    print(f" {time.monotonic() - begin:.0f} s" if code == 0 else f" {otherwise or 'failed'}", file=sys.stderr)
    return code


if __name__ == "__main__":
    words = sys.argv[1:]
    otherwise = words[1] if words[0] == "--else" else ""
    what, *command = words[2:] if otherwise else words
    sys.exit(run(what, *command, otherwise=otherwise))
