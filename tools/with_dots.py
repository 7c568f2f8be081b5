"""Run a command that may say nothing for long: what it does, a dot every two seconds, and how long it took.

usage: python tools/with_dots.py [--hush] WHAT COMMAND...      --hush: without what the command says on stderr
"""

import subprocess
import sys
import time

words = sys.argv[1:]
hush = words[0] == "--hush"
what, *command = words[hush:]
begin = time.monotonic()
print(what, end=" ", file=sys.stderr, flush=True)
with subprocess.Popen(command, stderr=subprocess.DEVNULL if hush else None) as process:
    while True:
        try:
            code = process.wait(2)
            break
        except subprocess.TimeoutExpired:
            print(".", end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # which the command has got, too
            code = process.wait()
            break
print(f" {time.monotonic() - begin:.0f} s" if code == 0 else " failed", file=sys.stderr)
sys.exit(code)
