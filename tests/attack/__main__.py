"""Attacks on still-export: damaged inputs, killed processes, hostile libraries, fuzzed native code; with seeds, so that each repeats.

python tests/attack damage --count 2000       # packages, models, adapters, tokenizers, over every verb and run_ort.py
python tests/attack kills --count 100         # export, export --force, linearize, verify
python tests/attack serve --count 40          # a server with kept states, killed while it starts, answers and stops
python tests/attack libraries                 # native code that nobody asked for
python tests/attack fuzz --seconds 3600       # each target of tests/plugins/fuzz, under the sanitizers
python tests/attack all                       # a few of each
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=("damage", "kills", "serve", "libraries", "fuzz", "all"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=50, help="cases, or kills of each verb")
    parser.add_argument("--verb", help="kill this verb only, e.g. 'export --force'; default: each in turn")
    parser.add_argument("--seconds", type=float, default=10, help="of each fuzz target")
    parser.add_argument("--model", type=Path, default=ROOT / "assets/small", help="STILL model to damage")
    parser.add_argument("--work", type=Path, help="folder for inputs, kept; default: a temporary one")
    parser.add_argument("--log", type=Path, help="file for a line of JSON per case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="still-attack-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        good = True
        if options.attack in ("damage", "all"):
            import damage

            found = damage.attack(
                work / "damage", options.model, options.seed, options.first, options.count, options.log
            )
            good &= set(found) <= {"refused", "answered"}
        if options.attack in ("kills", "all"):
            import kills

            good &= kills.attack(work / "kills", options.model, options.seed, options.count, options.verb)
        if options.attack in ("serve", "all"):
            import kill_serve

            good &= kill_serve.attack(work / "serve", options.model, options.seed, options.count)
        if options.attack in ("libraries", "all"):
            import libraries

            good &= libraries.attack()
        if options.attack in ("fuzz", "all"):
            import fuzz

            good &= fuzz.attack(options.seconds, options.seed)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
