#!/usr/bin/env bash
# The newest and the oldest packages that pyproject.toml allows: a wheel exports, verifies, compiles kernels for this processor and for
# TensorRT, and models are those of transformers. usage: bash tools/test_versions.sh [newest|oldest ...] [-- PYTEST ARGUMENTS]
# Environments of several GB under build/versions (torch brings CUDA's libraries there); uv resolves them, which pip cannot do downwards.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # modules are compiled once, not in each of a hundred processes
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
which=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do which+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#which[@]} -gt 0 ] || which=(oldest newest)
folder=build/versions
mkdir -p $folder
[ -x $folder/uv/bin/uv ] || { "$python" -m venv $folder/uv && $folder/uv/bin/python -m pip install -q uv; }
uv=$folder/uv/bin/uv
status=0
for one in "${which[@]}"; do
    case $one in
        oldest) resolution=lowest-direct ;;
        newest) resolution=highest ;;
        *) echo "test_versions.sh: $one: newest or oldest" >&2; exit 2 ;;
    esac
    [ -d $folder/$one ] || $uv venv -q --python "$python" $folder/$one
    $uv pip compile -q --resolution $resolution pyproject.toml --extra onnx --extra gguf --extra gpu -o $folder/$one.txt > /dev/null
    # what tests alone need is of today in both
    $uv pip install -q --python $folder/$one/bin/python -r $folder/$one.txt \
        pip wheel "setuptools>=77" pytest pytest-xdist hypothesis jsonschema psutil
    echo "$one: $(grep -E '^(torch|transformers|onnx|onnxruntime|onnxscript|triton|numpy)==' $folder/$one.txt | tr '\n' ' ')"
    PYTHONPATH=.:kernels:graphs OMP_NUM_THREADS=1 $folder/$one/bin/python -m pytest -n 2 --dist loadfile \
        tests/still_export/test_wheel.py tests/still_export/models/test_linear_families.py tests/still_export/runtime \
        tests/still_export/graph "$@" || status=$?
done
exit $status
