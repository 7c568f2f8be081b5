"""Prove a small random model of each family on ONNX Runtime, by the commands that users run, and keep one record of them.

  python -m tests.prove_families FOLDER [--only gla lfm2_moe-experts] [--dtype float16] [--provider cuda --arch sm_90] [--jobs 2]
  python -m tools.verdicts FOLDER/families-*.json

Linear families and those with experts, with the kernels of this machine. Exit code 1 where a proof fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from still_export.proof.records import write_record
from tests.still_export.expert_models import SPARSE, expert_model
from tests.still_export.linear_models import FAMILIES, linear_model
from tools.verdicts import read_records, sum_up

WITH_EXPERTS = {f"{name}-experts": name for name in SPARSE}


def prove(name: str, options: argparse.Namespace) -> str:
    """What the last command that was run has said; empty: the proof passed."""
    model, package = options.folder / f"model-{name}", options.folder / f"{name}-{options.dtype}"
    made = expert_model(WITH_EXPERTS[name]) if name in WITH_EXPERTS else linear_model(name)
    made.save_pretrained(model)
    still = [sys.executable, "-m", "still_export.cli.main"]
    kernels = ["--native", *(["--arch", options.arch] if options.arch else [])]
    export = [model, "--to", "onnx", *kernels, "--dtype", options.dtype, "--capacity-tokens", "1024", "-o", package]
    show = [package, "--provider", options.provider, "--lengths", "64", "-o", options.folder / "records"]
    for command in (["export", *export, "--force", "--quiet"], ["prove", *show, "--quiet"]):
        done = subprocess.run([*still, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{done.stdout}{done.stderr}".strip()
    return ""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*FAMILIES, *WITH_EXPERTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=names, metavar="NAME", help="such as 'nemotron_h, dense-experts'")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16"))
    parser.add_argument("--provider", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--arch", help="GPU whose kernels go into the package, as sm_90")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"--only: {', '.join(unknown)} is unknown; known: {', '.join(names)}.")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, said in zip(options.only, pool.map(lambda name: prove(name, options), options.only), strict=True):
            print(f"{name}: {said or 'passed'}", flush=True)
            failed += bool(said)
    if found := read_records(options.folder / "records"):
        print(f"record: {write_record(sum_up('families', found), options.folder)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
