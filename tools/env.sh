#!/bin/sh
# Make .venv with this package and extras (cpu where none are named), and say how to enter it. Run it, from any shell:
#   bash tools/env.sh [EXTRAS [PACKAGES COMMAND...]]      as tools/environment.py has them
case ${ZSH_EVAL_CONTEXT:-}:${0##*/} in
    *file*:*) sourced=1 ;;
    *:env.sh) sourced= ;;
    *) sourced=1 ;;
esac
if [ "$sourced" ]; then
    echo "tools/env.sh is run, not sourced. Type: bash tools/env.sh ${1:-cpu}" >&2
    unset sourced
    return 2
fi
set -eu
[ $# -gt 0 ] || set -- cpu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or later is needed, and $python is $("$python" -V 2>&1). Name another: PYTHON=python3.13 bash tools/env.sh" >&2
    exit 2
}
if ! .venv/bin/python -c "" 2> /dev/null; then
    "$python" tools/with_dots.py "making .venv" "$python" -m venv --clear .venv
fi
PATH=$PWD/.venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python tools/environment.py "$@"
[ $# -lt 2 ] || exit 0
case ${SHELL:-} in
    */fish) enter="source .venv/bin/activate.fish" ;;
    */csh | */tcsh) enter="source .venv/bin/activate.csh" ;;
    *) enter=". .venv/bin/activate" ;;
esac
echo "next: $enter && still-export assets/small --to onnx -o SMALL"
