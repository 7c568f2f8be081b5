#!/usr/bin/env bash
# All that a release publishes, built, audited and tried. usage: bash tools/release.sh OUT [--short]
#
#   wheels      still-export; still-export-kernels for x86-64 and aarch64, compiled by zig for glibc 2.28
#   sdist       of still-export
#   audits      auditwheel (manylinux_2_28), twine check
#   sbom/       CycloneDX: what each environment below holds
#   SHA256SUMS  of all files
#   trials      each wheel in an environment with nothing else: export, run, serve, verify. aarch64 under qemu-user, in a Debian root
#
# PYTHONS names the interpreters to try on this machine, such as "3.11 3.12 3.13 3.14"; uv finds or fetches them.
# --short, which CI runs: still-export and the kernels for this machine as the cache has them, tried in an environment that sees the
# packages of .venv; no SBOM. The whole needs 20 GB of disk, and of Debian: mmdebstrap, arch-test, qemu-user-static, binfmt-support.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { sed -n 2,3p "$0" | cut -c3-; exit 2; }
mkdir -p "$1"
out=$(realpath "$1") short=
[ "${2:-}" = --short ] && short=yes
[ -z "$(ls -A "$out")" ] || { echo "release.sh: $out is not empty" >&2; exit 2; }
python=${PYTHON:-python3} work=$PWD/build/release version=$("$python" -c 'exec(open("still_export/version.py").read()); print(__version__)')
here=$(uname -m) glibc=2.28
mkdir -p "$work"
say() { echo "== $*" >&2; }
if [ -z "$short" ] && [ "$here" = x86_64 ]; then # said before an hour of work
    { type mmdebstrap arch-test && [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; } &> /dev/null || {
        echo "release.sh: aarch64 cannot be tried here. Run: apt-get install mmdebstrap arch-test qemu-user-static binfmt-support;" \
            "update-binfmts --enable qemu-aarch64" >&2
        exit 1
    }
fi

say "tools"
tools=$work/tools/bin
wanted=(build auditwheel twine filelock nlohmann-json "setuptools>=77")
[ "$short" ] || wanted+=(ziglang==0.17.1 uv cyclonedx-bom)
[ -x "$tools/python" ] || "$python" -m venv "$work/tools"
"$tools/python" -m pip install -q --disable-pip-version-check "${wanted[@]}"

# A copy of what git has or would have: builds leave nothing behind, and take nothing of earlier ones.
source=$work/source
rm -rf "$source"
mkdir -p "$source"
git ls-files -z --cached --others --exclude-standard | while IFS= read -rd '' f; do [ ! -f "$f" ] || printf '%s\0' "$f"; done \
    | tar c --null -T - | tar x -C "$source"

say "still-export $version: wheel and sdist"
"$tools/python" -m build -q --no-isolation -o "$out" "$source"

kernels() { # kernels CPU: the wheel of still-export-kernels
    "$tools/python" -m build -q --no-isolation --wheel -o "$out" "-C--build-option=--plat-name=linux_$1" "$source/distributions/kernels"
}
if [ "$short" ]; then
    say "still-export-kernels for $here"
    kernels "$here"
else
    # The compilers that CMake is told: for a cross build by name, for this machine by CXX. zig takes -march for a CPU's name.
    compilers=$work/compilers
    mkdir -p "$compilers"
    for cpu in x86_64 aarch64; do
        cat > "$compilers/$cpu-linux-gnu-g++" << END
#!/usr/bin/env bash
exec "$tools/python" -m ziglang c++ -target $cpu-linux-gnu.$glibc "\${@/#-march=armv8.2-a/-mcpu=generic+v8_2a}"
END
        chmod +x "$compilers/$cpu-linux-gnu-g++"
    done
    headers=$(STILL_CACHE=$work/headers PYTHONPATH=graphs "$tools/python" -c \
        'from still_export.targets.ort.headers import fetch_headers; print(fetch_headers())')
    for cpu in x86_64 aarch64; do
        say "still-export-kernels for $cpu"
        STILL_CACHE=$work/compiled STILL_ONNXRUNTIME_INCLUDE=${STILL_ONNXRUNTIME_INCLUDE:-$headers} PATH=$compilers:$PATH \
            CXX=$compilers/$here-linux-gnu-g++ kernels $cpu
    done
fi

say "audits"
"$tools/python" -m twine check --strict "$out"/*
for wheel in "$out"/still_export_kernels-*.whl; do
    "$tools/auditwheel" show "$wheel" | tee "$work/auditwheel.txt" >&2
    [ "$short" ] || grep -q "manylinux_2_${glibc#2.}_" <<< "$wheel" || { echo "release.sh: $wheel is not for glibc $glibc" >&2; exit 1; }
    "$tools/python" tools/release_trial.py audit "$wheel" "$work/auditwheel.txt"
done

trial=$work/trial
rm -rf "$trial"
mkdir -p "$trial"
mine=("$out"/still_export-*.whl "$out"/still_export_kernels-*"$here".whl)
try() { # try INTERPRETER: uses what its environment has
    say "trial on $here, $("$1" -V)"
    env -u PYTHONPATH "$1" tools/release_trial.py try assets/small "$trial/work"
    rm -rf "$trial"
}
if [ "$short" ]; then
    "$python" -m venv "$trial/venv"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$trial/venv/lib/$(cd "$trial/venv/lib"; echo python*)/site-packages/others.pth"
    "$trial/venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-index "${mine[@]}"
    try "$trial/venv/bin/python"
else
    mkdir -p "$out/sbom"
    for one in ${PYTHONS:-$python}; do
        "$tools/uv" venv -q --python "$one" "$trial/venv"
        "$tools/uv" pip install -q --python "$trial/venv/bin/python" --find-links "$out" "still-export[cpu,kernels]==$version"
        minor=$("$trial/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        "$tools/cyclonedx-py" environment --of JSON -o "$out/sbom/still-export-$version-$here-python$minor.cdx.json" "$trial/venv/bin/python"
        try "$trial/venv/bin/python"
    done
fi

if [ -z "$short" ] && [ "$here" = x86_64 ]; then
    say "trial on aarch64 (qemu-user)"
    root=$work/aarch64
    [ -e "$root/usr/bin/python3" ] || mmdebstrap -q --mode=root --variant=apt --architectures=arm64 --include=python3,libgomp1 \
        "${STILL_DEBIAN:-$(. /etc/os-release; echo "$VERSION_CODENAME")}" "$root"
    minor=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    rm -rf "$root/opt/site" "$root/opt/trial"
    "$tools/uv" pip install -q --python-platform aarch64-manylinux_2_31 --python-version "$minor" --target "$root/opt/site" \
        --find-links "$out" --only-binary :all: "still-export[cpu,kernels]==$version"
    "$tools/uv" pip freeze --path "$root/opt/site" \
        | "$tools/cyclonedx-py" requirements --of JSON -o "$out/sbom/still-export-$version-aarch64-python$minor.cdx.json" -
    echo /opt/site > "$root/usr/lib/python3/dist-packages/site.pth" # isolated interpreters see it, which PYTHONPATH does not reach
    mkdir -p "$root/opt/trial"
    cp -r assets/small tools/release_trial.py "$root/opt/trial"
    # ONNX Runtime opens weights by /proc. PyTorch asks /sys and /proc/cpuinfo for the processor, which are this machine's: these lines
    # describe the one that qemu emulates.
    cpu=$root/sys/devices/system/cpu
    mkdir -p "$cpu/cpu0/regs/identification"
    echo 0 | tee "$cpu/possible" > "$cpu/present"
    echo 0x00000000413fd0c1 > "$cpu/cpu0/regs/identification/midr_el1"
    printf '%s\t: %s\n' processor 0 \
        Features "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp" \
        "CPU implementer" 0x41 "CPU architecture" 8 "CPU variant" 0x3 "CPU part" 0xd0c "CPU revision" 1 > "$root/opt/cpuinfo"
    unshare --mount bash -c 'mount -t proc proc "$0/proc" && mount --bind "$0/opt/cpuinfo" "$0/proc/cpuinfo" \
        && exec chroot "$0" env QEMU_CPU=neoverse-n1 PATH=/usr/bin:/bin "$@"' "$root" \
        python3 /opt/trial/release_trial.py try /opt/trial/small /opt/trial/work
fi

(cd "$out"; find . -type f -printf '%P\n' | sort | xargs sha256sum > "$work/SHA256SUMS"; mv "$work/SHA256SUMS" SHA256SUMS)
say "released into $out"
ls -l "$out" >&2
