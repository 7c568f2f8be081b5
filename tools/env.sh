# Sourced by demo.sh and test.sh: make .venv with this package and the extras in $1 (cpu where none are named), at the versions of
# constraints.txt, and enter it.
# The words after $1 are a command that needs the packages of $beside alone: it runs beside the rest of the installation.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
[ -d .venv ] || "$python" tools/with_dots.py "making .venv" "$python" -m venv .venv
. .venv/bin/activate
export PIP_DISABLE_PIP_VERSION_CHECK=1
# The constraints are those of the Python that CI runs; others resolve the ranges of pyproject.toml.
# Modules are compiled when they are first imported, and kept: pip would compile all of every package, half a minute for what is never
# used; an environment that keeps none compiles torch and transformers in each of a hundred processes, six seconds every time.
unset PYTHONDONTWRITEBYTECODE
install="-m pip install -q --no-compile"
if python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then install+=" -c constraints.txt"; fi
stamp=.venv/.installed
extras=${1:-cpu}
wanted="$extras $(cat pyproject.toml constraints.txt | sha256sum)"
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
    if [ $# -gt 1 ]; then
        # shellcheck disable=SC2086
        python tools/with_dots.py "installing $beside" python $install $beside
        nice -n 5 "${@:2}" > /dev/null 2>&1 &
    fi
    # torch alone and first: packages that depend on it must find it, not choose a build of their own. Its CUDA build takes 6 GB on disk,
    # of no use without a driver; that for CPUs is on PyTorch's own index alone.
    torch_index=https://download.pytorch.org/whl/cpu
    if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi > /dev/null; then
        echo "PyTorch: the usual build, since an NVIDIA driver is here" >&2
        python tools/with_dots.py "installing PyTorch" python $install torch
    else
        echo "PyTorch: the build for CPUs, since no NVIDIA driver is here" >&2
        if ! python tools/with_dots.py --hush "installing PyTorch" python $install --timeout 5 --retries 0 --index-url $torch_index torch; then
            echo "PyTorch: $torch_index cannot be reached; taking what the usual index has" >&2
            python tools/with_dots.py "installing PyTorch" python $install torch
        fi
    fi
    echo "PyTorch: $(python -c 'import importlib.metadata as m; print(m.version("torch"))')" >&2
    python tools/with_dots.py "installing still-export[$extras]" python $install -e ".[$extras]"
    echo "$wanted" > $stamp
fi
