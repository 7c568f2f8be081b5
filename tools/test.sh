#!/usr/bin/env bash
# Lint, types and tests, from nothing. usage: bash tools/test.sh [--fast|--all] [PYTEST ARGUMENTS]
# --fast leaves out what is marked slow (more than two seconds of a processor), --all leaves out nothing: without it what is marked long
# (every architecture, 65,536 steps, fresh environments ...) stays out. The slowest tests are listed at the end.
set -euo pipefail
kind=(-m "not long")
case ${1:-} in
    --fast) kind=(-m "not slow and not long"); shift ;;
    --all) kind=(); shift ;;
esac
# The native kernel's tests wait for a compiler for two minutes of a processor, of which pip leaves one.
beside="nlohmann-json pytest"
. "$(dirname "$0")/env.sh" dev env PYTHONPATH=graphs python -m tests.plugins.builds
ruff check .
ruff format --check .
# ONNX Runtime's C headers are in no wheel; without them the native kernel's tests are skipped.
if [ -z "${STILL_ONNXRUNTIME_INCLUDE:-}" ] && headers=$(STILL_CACHE=build python -m still_export.cli.main kernels headers); then
    export STILL_ONNXRUNTIME_INCLUDE=$headers
fi
# Types are checked beside the tests, and said after them.
types=$(mktemp)
mypy > "$types" 2>&1 &
checking=$!
trap 'kill $checking 2> /dev/null || true; rm -f "$types"' EXIT
# Two processes of one thread each: the tests are many small calls. By file, in the order of tests/conftest.py: tests of one file share
# what one of them computed.
status=0
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 2 ${kind[@]+"${kind[@]}"} "$@" || status=$?
wait $checking || status=$?
cat "$types"
exit $status
