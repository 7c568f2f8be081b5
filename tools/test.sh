#!/usr/bin/env bash
# Lint, types and tests, from nothing. usage: bash tools/test.sh [PYTEST ARGUMENTS]
set -euo pipefail
. "$(dirname "$0")/env.sh" dev
ruff check .
ruff format --check .
mypy
# Two processes of one thread each: the tests are many small calls.
OMP_NUM_THREADS=1 python -m pytest -n 2 "$@"
