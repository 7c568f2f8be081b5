#!/usr/bin/env bash
# Everything that only a GPU can show about the kernels. usage: bash tools/check_kernels.sh [-o FOLDER] [STEP ...]
# Steps: compile tests slow memcheck racecheck bench tune; without any: all but slow. compile: all at once, on every core. Logs and JSON go to FOLDER (build/check_kernels).
# Runs without installation; pytest may come through PYTHONPATH. PYTHON, KERNEL_CASES (pytest -k of the sanitizer), TUNE_SECONDS.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=.:kernels:graphs${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
out=build/check_kernels
[ "${1:-}" = -o ] && { out=$2; shift 2; }
mkdir -p "$out"
steps=${*:-compile tests memcheck racecheck bench tune}
cases=${KERNEL_CASES:-crossing or promoting or folding}
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"' || exit 2

sanitizer() { # TOOL: few cases, compiled; every kernel is then slower a hundred times
    local program
    program=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
    [ -n "$program" ] || { echo "compute-sanitizer is missing"; return 3; }
    # PyTorch's allocator would hide what lies beside a tensor
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${SANITIZER_SECONDS:-300}" "$program" --tool "$1" --error-exitcode 9 --print-limit 20 \
        "$python" -m pytest -q -p no:cacheprovider -m gpu tests/still_kernels/hybrid_attention/test_triton.py -k "compiled and ($cases)"
}
each_op() { # MODULE: bench or tune, of every op, one file each
    local op failed=0 more=()
    for op in HybridAttention Attention LinearAttention CausalConv; do
        if [ "$1" = bench ]; then more=(--json "$out/bench-$op.json"); else more=(--seconds "${TUNE_SECONDS:-240}" -o "$out/tune-$op.json"); fi
        "$python" -m "tools.kernels.$1" "$op" "${more[@]}" || failed=1
    done
    return $failed
}
run() {
    case $1 in
    compile) "$python" -W ignore tools/compile_kernels.py ;;
    tests) "$python" -m pytest -q -p no:cacheprovider -m "gpu and not slow" tests/still_kernels ;;
    slow) "$python" -m pytest -q -p no:cacheprovider -m "gpu and slow" tests/still_kernels ;;
    memcheck | racecheck) sanitizer "$1" ;;
    bench | tune) each_op "$1" ;;
    *) echo "unknown step $1; known: compile tests slow memcheck racecheck bench tune"; return 2 ;;
    esac
}
failed=0
for step in $steps; do
    begin=$SECONDS
    run "$step" 2>&1 | tee "$out/$step.log"
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || failed=1
    summary+=$(printf '%-10s %4ds  %s' "$step" $((SECONDS - begin)) "$([ "$status" = 0 ] && echo passed || echo "FAILED ($status)")")$'\n'
done
printf '\n%s' "$summary"
exit $failed
