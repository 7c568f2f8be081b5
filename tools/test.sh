#!/usr/bin/env bash
# Lint, types and tests, from nothing. usage: bash tools/test.sh [--fast | --changed [BASE] | --all] [PYTEST ARGUMENTS]
#
#   (nothing)         what CI runs: all but what is marked long
#   --fast            without what is marked slow or took more than 0.15 seconds in an earlier run on this machine
#   --changed [BASE]  the test files that a change can reach (tools/changed_tests.py): since BASE, such as main, or not committed yet
#   --all             with what is marked long (every architecture, 65,536 steps, fresh environments ...), and with all kernels
#                     that tests look at
set -euo pipefail
kind=(-m "not long") changed=
case ${1:-} in
    --fast) kind=(-m "not long" --fast); shift ;;
    --changed) changed=yes; shift; base=; case ${1:-} in ""|-*|*::*) ;; *) base=$1; shift ;; esac ;;
    --all) kind=(); shift ;;
esac
# The native kernel's tests wait for a compiler for two minutes of a processor, of which pip leaves one.
cd "$(dirname "$0")/.."
bash tools/env.sh dev "nlohmann-json pytest" env PYTHONPATH=graphs python -m tests.plugins.builds
. .venv/bin/activate
# An environment that keeps no compiled modules compiles torch and transformers in each of a hundred processes, six seconds every time.
unset PYTHONDONTWRITEBYTECODE
ruff check .
ruff format --check .
files=()
if [ "$changed" ]; then
    found=$(python -m tools.changed_tests ${base:+"$base"})
    [ "$found" ] || { echo "no test reaches what changed"; exit; }
    mapfile -t files <<< "$found"
fi
# ONNX Runtime's C headers are in no wheel; without them the native kernel's tests are skipped.
if [ -z "${STILL_ONNXRUNTIME_INCLUDE:-}" ] && headers=$(STILL_CACHE=build python -m still_export.cli.main kernels headers); then
    export STILL_ONNXRUNTIME_INCLUDE=$headers
fi
# Types are checked, and verdicts compared with the code that they are of, beside the tests; said after them.
said=$(mktemp)
{ mypy && python -m tools.verdicts --old; } > "$said" 2>&1 &
checking=$!
trap 'kill $checking 2> /dev/null || true; rm -f "$said"' EXIT
# Two processes of one thread each: the tests are many small calls. By file: tests of one file
# share what one of them computed.
status=0
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --durations 40 --durations-min 2 ${kind[@]+"${kind[@]}"} \
    ${files[@]+"${files[@]}"} "$@" || status=$?
wait $checking || status=$?
cat "$said"
exit $status
