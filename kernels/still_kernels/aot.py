"""Ahead-of-time archive: every kernel of an op as cubins for the C++ hosts, with its launch plan, compiled without a GPU.

    python -m still_kernels.aot OP --arch sm_80,sm_90 -o DIR

writes `index.json` and one file per distinct cubin. docs/reference/kernels.md describes the index.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from still_graphs.errors import ConfigError, UnsupportedError, unknown
from still_kernels.common.cubin import read_entry, trailing_pointers
from still_kernels.common.cuda_function import CudaFunction, nvrtc
from still_kernels.op_kernels import Build, OpKernels
from still_kernels.registry import kernels_of, op_names
from still_kernels.tile import SHARED_BYTES, KernelTile

FORMAT = "still-kernels-aot"
FORMAT_VERSION = 3
ARCHS = tuple(f"sm_{arch}" for arch in SHARED_BYTES)
MIN_TRITON = {110: (3, 7)}
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "int64": "i64", "int8": "i8"}


def parse_arch(name: str) -> int:
    """90 for "sm_90"; ConfigError for an architecture without a tile table."""
    if name not in ARCHS:
        raise unknown(name, ARCHS, f"--arch {name!r}")
    return int(name.removeprefix("sm_"))


def signature_of(
    function: Any, kernels: OpKernels, variant: Any, tile: KernelTile, build: Build
) -> tuple[dict[str, str], dict[str, Any]]:
    """Triton signature and compile-time values of a kernel; pointers that the plan does not know are absent too."""
    constants, absent = {**build.constants, **tile.constants}, build.absent
    elements = kernels.element_types(variant)
    reals = {name for name, value in kernels.plan.compiled.arguments.items() if value.kind == "real"}
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    for argument in function.arg_names:
        plain = argument.removeprefix("p_").removeprefix("d_")
        if argument.startswith("d_") and plain not in absent:
            element = TRITON_TYPES[elements[plain]]
            element = "fp8e4nv" if element.startswith("i") else element  # integers hold numbers in e4m3
            signature[argument] = descriptor_type(function, element, tile.block(plain))
        elif plain != argument:
            if plain in absent or plain not in elements:
                signature[argument], values[argument] = "constexpr", None
            else:
                signature[argument] = "*" + TRITON_TYPES[elements[plain]]
        elif argument in constants:
            signature[argument], values[argument] = "constexpr", constants[argument]
        else:
            signature[argument] = "fp32" if argument in reals else "i32"
    return signature, values


def descriptor_type(function: Any, element: str, block: tuple[int, int]) -> str:
    """What a signature says of a descriptor; in Gluon, whose blocks lie in shared memory as matrix instructions want them."""
    if not function.is_gluon():
        return f"tensordesc<{element}[{block[0]}, {block[1]}]>"
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return f"tensordesc<{element}[{block[0]}, {block[1]}],{layout!r}>"


def described(argument: str, kind: str, descriptors: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """An argument as the index has it; `descriptors` has what the compiler says of those, in order."""
    plain = argument.removeprefix("p_").removeprefix("d_")
    if kind.startswith("tensordesc"):
        found = next(descriptors)
        element = kind.removeprefix("tensordesc<").partition("[")[0]
        return {
            "name": plain,
            "type": "descriptor",
            "element": element,
            "box": list(found["block_size"]),
            "swizzle": found["swizzle"],
        }
    if kind.startswith("*"):
        return {"name": plain, "type": "ptr", "element": kind[1:]}
    return {"name": plain, "type": {"fp32": "f32"}.get(kind, kind)}


def compile_cuda(
    function: CudaFunction, arch: int, signature: Mapping[str, str], values: Mapping[str, Any], num_warps: int
) -> tuple[bytes, dict[str, Any]]:
    """The cubin of a kernel in CUDA C++, and what its entry has in the place of Triton's; signature and values: see `signature_of`."""
    plain = {short: name for name, short in TRITON_TYPES.items()}
    elements = {name: plain[kind.removeprefix("*")] for name, kind in signature.items() if kind.startswith("*")}
    found = function.ahead(arch, values, elements, [name for name, value in values.items() if value is None])
    own = {"symbol": found.symbol, "shared_bytes": found.shared_bytes, "num_warps": num_warps}
    together = {"cluster": values[function.cluster]} if function.cluster else {}
    return found.cubin, {**own, **together}


def compile_triton(
    function: Any, name: str, arch: int, signature: Mapping[str, str], values: Mapping[str, Any], tile: KernelTile
) -> tuple[bytes, dict[str, Any], Iterator[Mapping[str, Any]]]:
    """The cubin of one of Triton's kernels, what its entry has of its own, and what the compiler says of its descriptors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(function.arg_names)
        if signature[argument].startswith("*")
    }
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(fn=function, signature=signature, constexprs=values, attrs=attrs)
    options = {**tile.options(), "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    meta = compiled.metadata
    demand_launchable(name, meta)
    own = {"symbol": meta.name, "shared_bytes": meta.shared, "num_warps": meta.num_warps}
    return compiled.asm["cubin"], own, iter(getattr(meta, "tensordesc_meta", None) or ())


def demand_launchable(name: str, meta: Any) -> None:
    """Raise ConfigError for what Triton's metadata ask of a launch and hosts of the archive do not do."""
    scratch = {kind: getattr(meta, f"{kind}_scratch_size", 0) for kind in ("global", "profile")}
    if any(scratch.values()):
        raise ConfigError(
            f"{name} needs scratch memory ({scratch} bytes), of which hosts of compiled kernels have none."
        )
    if getattr(meta, "num_ctas", 1) != 1 or getattr(meta, "launch_cooperative_grid", False):
        raise ConfigError(
            f"{name} is launched as a cluster of programs or a cooperative grid, which hosts of compiled kernels do not do."
        )


def compile_variant(
    op: str, variant: Any, arch: int, only: str = "", build: Build | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Compile all kernels of one variant of an op for one architecture, or only one of them; `build`: with other blocks.

    Returns:
        The variant's entry of the index, and its cubins by file name.

    Raises:
        ConfigError: The installed Triton cannot compile for `arch`, or what it compiles is launched in another way than hosts launch.
    """
    import triton

    installed = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if installed < MIN_TRITON.get(arch, (3, 0)):
        need = ".".join(str(part) for part in MIN_TRITON[arch])
        raise ConfigError(f"sm_{arch} needs Triton >= {need}; {triton.__version__} is installed.")
    triton.knobs.compilation.disable_line_info = True  # line tables hold paths: bytes would depend on the machine
    op_kernels = kernels_of(op)
    functions, build = op_kernels.functions(), build or op_kernels.build(variant, arch)
    kernels: dict[str, Any] = {}
    cubins: dict[str, bytes] = {}
    for name, tile in build.tiles.items():
        if only not in ("", name):
            continue
        function = functions[name]
        signature, values = signature_of(function, op_kernels, variant, tile, build)
        descriptors: Iterator[Mapping[str, Any]] = iter(())
        if isinstance(function, CudaFunction):
            cubin, own = compile_cuda(function, arch, signature, values, tile.num_warps)
        else:
            cubin, own, descriptors = compile_triton(function, name, arch, signature, values, tile)
        if own["shared_bytes"] > SHARED_BYTES[arch]:
            raise ConfigError(
                f"{name} of {variant} needs {own['shared_bytes']} bytes of shared memory; sm_{arch} has "
                f"{SHARED_BYTES[arch]}. Lower its blocks in its plan.py."
            )
        file = hashlib.sha256(cubin).hexdigest()[:24] + ".cubin"
        cubins[file] = cubin
        passed = [described(argument, kind, descriptors) for argument, kind in signature.items() if kind != "constexpr"]
        types = [argument["type"] for argument in passed]
        entry_of = read_entry(cubin, own["symbol"])
        kernels[name] = {
            **own,
            "cubin": file,
            "threads": 32 * own["num_warps"],
            "trailing_null_pointers": trailing_pointers(entry_of, own["symbol"], types, own.get("cluster", 1)),
            "args": passed,
            "constexprs": {k: v for k, v in sorted(values.items()) if not k.startswith(("p_", "d_"))},
        }
    entry = {"key": asdict(variant), "arch": f"sm_{arch}", "constants": dict(build.plan_constants), "kernels": kernels}
    return entry, cubins


_SOURCES = ("kernels", "triton_", "gluon_", "cuda_")


def source_hash(kernels: OpKernels) -> str:
    """SHA-256 over an op's kernel sources, tile tables and plan, and over what its kernels share with others."""
    digest = hashlib.sha256()
    shared = Path(__file__).with_name("common")
    files = [path for path in kernels.folder.rglob("*") if path.suffix in (".py", ".cu")]
    own = [p for p in files if "plan" in (p.stem, p.parent.name) or p.stem.startswith(_SOURCES)]
    for path in [*sorted(shared.glob("*_*.py")), *sorted(own)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_archive(
    output: Path,
    archs: Sequence[int],
    op: str,
    variants: Iterable[Any],
    jobs: int = 1,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compile `variants` of an op for `archs` into the folder `output`, in `jobs` processes; returns the index. `log` hears of each."""
    import triton

    kernels = kernels_of(op)
    output.mkdir(parents=True, exist_ok=True)
    work = [(op, variant, arch) for variant, arch in itertools.product(variants, archs)]
    entries = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        results = (
            pool.map(compile_variant, *zip(*work, strict=True))
            if jobs > 1
            else itertools.starmap(compile_variant, work)
        )
        for (_, variant, arch), (entry, cubins) in zip(work, results, strict=True):
            entries.append(entry)
            for file, data in cubins.items():
                (output / file).write_bytes(data)
            log(f"sm_{arch} {variant}")
    index = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "op": f"{kernels.spec.domain}::{kernels.spec.name}",
        "op_version": kernels.spec.version,
        "triton": triton.__version__,
        "source_hash": source_hash(kernels),
        "plan": kernels.plan.data,
        "variants": entries,
    }
    functions = kernels.functions()
    if any(isinstance(functions[name], CudaFunction) for entry in entries for name in entry["kernels"]):
        index["nvrtc"] = ".".join(map(str, nvrtc()[1]))
    (output / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    return index


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 0 on success, 2 on a usage error."""
    parser = argparse.ArgumentParser(prog="python -m still_kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_80,sm_86,sm_89,sm_90", help=f"comma-separated, of {', '.join(ARCHS)}")
    parser.add_argument("op", choices=op_names())
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--variants", type=Path, help="JSON list of variants (fields of the op's Variant); default: built in"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    options = parser.parse_args(arguments)
    try:
        archs = [parse_arch(name) for name in options.arch.split(",")]
        kernels = kernels_of(options.op)
        variants = kernels.default_variants()
        if options.variants:
            variants = [kernels.variant(**fields) for fields in json.loads(options.variants.read_text())]
        if options.output.exists() and any(options.output.iterdir()) and not options.force:
            raise ConfigError(f"{options.output} is not empty; --force writes into it.")
        write_archive(
            options.output, archs, options.op, variants, options.jobs, lambda line: print(line, file=sys.stderr)
        )
    except (ConfigError, UnsupportedError, TypeError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
