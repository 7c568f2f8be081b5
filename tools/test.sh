#!/usr/bin/env bash
# Lint, types and tests, from nothing. usage: bash tools/test.sh [--fast] [PYTEST ARGUMENTS]
# --fast leaves out what is marked slow: whatever took more than two seconds of a processor. The slowest tests are listed at the end.
set -euo pipefail
kind=()
[ "${1:-}" = --fast ] && { kind=(-m "not slow"); shift; }
. "$(dirname "$0")/env.sh" dev
ruff check .
ruff format --check .
mypy
# ONNX Runtime's C headers are in no wheel; without them the native kernel's tests are skipped.
if [ -z "${STILL_ONNXRUNTIME_INCLUDE:-}" ] && headers=$(python tools/get_ort_headers.py build/onnxruntime-include); then
    export STILL_ONNXRUNTIME_INCLUDE=$headers
fi
# Two processes of one thread each: the tests are many small calls. By file: tests of one file share what one of them computed.
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --durations 40 --durations-min 2 ${kind[@]+"${kind[@]}"} "$@"
