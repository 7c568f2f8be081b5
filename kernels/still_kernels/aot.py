"""Ahead-of-time archive: every kernel of still::HybridAttention as cubins for the C++ hosts, compiled without a GPU.

    python -m still_kernels.aot --arch sm_80,sm_90 -o DIR

writes `index.json` and one file per distinct cubin. docs/kernels.md describes the index.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from still_graphs.errors import ConfigError
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_kernels.hybrid_attention.config import CHOICES, HybridAttentionConfig
from still_kernels.hybrid_attention.tiles import MAX_SALIENT_PER_CHUNK, SHARED_BYTES, pow2, tile_table

FORMAT = "still-kernels-aot"
FORMAT_VERSION = 1
ARCHS = tuple(f"sm_{arch}" for arch in SHARED_BYTES)
MIN_TRITON = {110: (3, 7)}
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "int64": "i64", "int8": "i8"}
FLOAT_ARGUMENTS = ("scale", "epsilon")
POINTER_TYPES = {
    "window_factor": "fp32",
    "flags": "i8",
    "evicted_count": "i32",
    "counters": "i32",
    **{s.name: "fp32" for s in HYBRID_ATTENTION.states if s.dtype == "float32"},
    **dict.fromkeys(
        ("score", "prefix_z", "linear_sum", "part_acc", "part_ml", "part_lin", "part_den", "part_window"),
        "fp32",
    ),
}
"""Element types of pointer arguments that do not depend on the variant; all others have the activations' type."""


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument."""

    dtype: str = "bfloat16"
    head_dim: int = 128
    chunk_size: int = 64
    feature_rows: int = 128
    feature_map: str = "np_softmax_pm"
    gate: int = 1
    select_scope: str = "q_head"
    saliency: str = "margin"
    overflow: str = "error"
    window_factor: int = 0
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        known = {"dtype": ("bfloat16", "float16", "float32"), "count_dtype": ("int32", "int64"), **CHOICES}
        for name, value in asdict(self).items():
            if name in known and name != "gate" and value not in known[name]:
                raise ConfigError(f"{name}={value!r} is unknown; known: {', '.join(known[name])}.")

    def config(self) -> HybridAttentionConfig:
        """A layer configuration with the variant's compile-time properties."""
        return HybridAttentionConfig(
            num_heads=1,
            num_kv_heads=1,
            head_dim=self.head_dim,
            chunk_size=self.chunk_size,
            salient_per_chunk=min(MAX_SALIENT_PER_CHUNK, self.chunk_size),
            feature_dim=self.feature_rows,
            feature_map=self.feature_map,
            gate="channel" if self.gate else "none",
            select_scope=self.select_scope,
            saliency=self.saliency,
            overflow=self.overflow,
        )


def default_variants() -> list[Variant]:
    """Gated layers with chunks of 64: both 16-bit types, head sizes 64 and 128, both scopes, both count types."""
    return [
        Variant(dtype=dtype, head_dim=dim, feature_rows=dim, select_scope=scope, count_dtype=count)
        for dtype, dim, scope, count in itertools.product(
            ("bfloat16", "float16"), (64, 128), ("q_head", "kv_group_max"), ("int64", "int32")
        )
    ]


def parse_arch(name: str) -> int:
    """90 for "sm_90"; ConfigError for an architecture without a tile table."""
    if name not in ARCHS:
        raise ConfigError(f"--arch {name!r} is unknown; known: {', '.join(ARCHS)}.")
    return int(name.removeprefix("sm_"))


def signature_of(kernel: Any, name: str, variant: Variant, constants: dict[str, Any]) -> tuple[dict[str, str], dict]:
    """Triton signature and compile-time values of a kernel."""
    absent = {"query_start", "state_row", "present_length", "trace"}
    if not variant.gate:
        absent.add("gate")
    if not variant.window_factor:
        absent.add("window_factor")
    if variant.overflow == "error":
        absent |= {"evicted_key", "evicted_value", "evicted_count"}
    if variant.overflow != "fold_min_score":
        absent.add("salient_score")
    types = {
        **POINTER_TYPES,
        "new_tokens": TRITON_TYPES[variant.count_dtype],
        "past_length": TRITON_TYPES[variant.count_dtype],
        **dict.fromkeys(("prefix_kv", "phi_k", "linear"), "fp32" if variant.dtype == "float32" else "bf16"),
    }
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    for argument in kernel.arg_names:
        if argument.startswith("p_"):
            plain = argument.removeprefix("p_")
            if plain in absent:
                signature[argument], values[argument] = "constexpr", None
            else:
                signature[argument] = "*" + types.get(plain, TRITON_TYPES[variant.dtype])
        elif argument in constants:
            signature[argument], values[argument] = "constexpr", constants[argument]
        else:
            signature[argument] = "fp32" if argument in FLOAT_ARGUMENTS else "i32"
    return signature, values


def compile_variant(variant: Variant, arch: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Compile all kernels of one variant for one architecture.

    Returns:
        The variant's entry of the index, and its cubins by file name.

    Raises:
        ConfigError: The installed Triton cannot compile for `arch`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from still_kernels.hybrid_attention.launch import KERNELS, constants_of

    installed = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if installed < MIN_TRITON.get(arch, (3, 0)):
        need = ".".join(str(part) for part in MIN_TRITON[arch])
        raise ConfigError(f"sm_{arch} needs Triton >= {need}; {triton.__version__} is installed.")
    triton.knobs.compilation.disable_line_info = True  # line tables hold paths: bytes would depend on the machine
    config = variant.config()
    wide = variant.dtype == "float32"
    table = tile_table(arch, variant.head_dim, variant.chunk_size, variant.feature_rows, wide)
    kernels: dict[str, Any] = {}
    cubins: dict[str, bytes] = {}
    for name, tile in table.kernels().items():
        kernel = KERNELS[name]
        constants = {**constants_of(config, wide, ragged=False, window_factor=bool(variant.window_factor))}
        constants |= tile.constants
        signature, values = signature_of(kernel, name, variant, constants)
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, argument in enumerate(kernel.arg_names)
            if signature[argument].startswith("*")
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
        options = {**tile.options(), "enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        meta = compiled.metadata
        assert meta.global_scratch_size == 0 and meta.profile_scratch_size == 0, f"{name} needs scratch memory"
        if meta.shared > SHARED_BYTES[arch]:
            raise ConfigError(
                f"{name} of {variant} needs {meta.shared} bytes of shared memory; sm_{arch} has {SHARED_BYTES[arch]}. "
                "Lower its blocks in tiles.py."
            )
        cubin = compiled.asm["cubin"]
        file = hashlib.sha256(cubin).hexdigest()[:24] + ".cubin"
        cubins[file] = cubin
        kernels[name] = {
            "symbol": meta.name,
            "cubin": file,
            "num_warps": meta.num_warps,
            "threads": 32 * meta.num_warps,
            "shared_bytes": meta.shared,
            "trailing_null_pointers": 2,
            "args": [
                {
                    "name": argument.removeprefix("p_"),
                    "type": "ptr" if kind.startswith("*") else {"fp32": "f32"}.get(kind, kind),
                    **({"element": kind[1:]} if kind.startswith("*") else {}),
                }
                for argument, kind in signature.items()
                if kind != "constexpr"
            ],
            "grid": GRIDS[name],
            "constexprs": {k: v for k, v in sorted(values.items()) if not k.startswith("p_")},
        }
    scan = table.scan.constants
    host = {
        "scan_programs": -(-config.state_features // scan["FB"]) * -(-variant.head_dim // scan["DB"]),
        "features_tiles": table.features.constants["TB"],
        "score_blocks_per_chunk": variant.chunk_size // table.score.constants["BM"],
        "prefix_every": scan["EVERY"],
        "linear_rows": table.linear.constants["BM"] * table.linear.constants["TB"],
        "attend_rows": table.attend.constants["BM"],
        "value_slices": pow2(variant.head_dim) // table.decode.constants["DS"],
        "window_parts": 2 * variant.chunk_size // table.decode.constants["BL"],
        "segment_tiles": table.segment_tiles,
        "decode_programs": table.decode_programs,
        "evicted_rows": pow2(config.salient_per_chunk),
    }
    entry = {"key": asdict(variant), "arch": f"sm_{arch}", "constants": host, "kernels": kernels}
    return entry, cubins


GRIDS = {
    "score": ["tiles * score_blocks_per_chunk", "H", "B"],
    "select": ["tiles, or 1 with a folding policy", "HS", "B"],
    "features": ["ceil(n_tiles / features_tiles)", "H", "B"],
    "scan": ["scan_programs", "H", "B"],
    "linear": ["ceil(n_tiles * C / linear_rows)", "H", "B"],
    "attend": ["ceil(n_tiles * C / attend_rows)", "H", "B"],
    "commit": ["H", "B", "1"],
    "decode": ["H / HS * (value_slices + window_parts + 1) + NS", "HS", "B"],
}
"""Grid rules, for readers; the C++ core mirrors launch.py."""


def source_hash() -> str:
    """SHA-256 over the kernel sources and tile tables."""
    folder = Path(__file__).parent / "hybrid_attention"
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("triton_*.py"), folder / "tiles.py", folder / "launch.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_archive(
    output: Path,
    archs: Sequence[int],
    variants: Iterable[Variant],
    jobs: int = 1,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compile `variants` for `archs` into the folder `output`, in `jobs` processes; returns the index. `log` hears of each."""
    import triton

    output.mkdir(parents=True, exist_ok=True)
    work = list(itertools.product(variants, archs))
    entries = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        results = (
            pool.map(compile_variant, *zip(*work, strict=True))
            if jobs > 1
            else itertools.starmap(compile_variant, work)
        )
        for (variant, arch), (entry, cubins) in zip(work, results, strict=True):
            entries.append(entry)
            for file, data in cubins.items():
                (output / file).write_bytes(data)
            log(f"sm_{arch} {variant}")
    index = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "op": f"{HYBRID_ATTENTION.domain}::{HYBRID_ATTENTION.name}",
        "op_version": HYBRID_ATTENTION.version,
        "triton": triton.__version__,
        "source_hash": source_hash(),
        "variants": entries,
    }
    (output / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    return index


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 0 on success, 2 on a usage error."""
    parser = argparse.ArgumentParser(prog="python -m still_kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_80,sm_86,sm_89,sm_90", help=f"comma-separated, of {', '.join(ARCHS)}")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--variants", type=Path, help="JSON list of variants (fields of Variant); default: built in")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    options = parser.parse_args(arguments)
    try:
        archs = [parse_arch(name) for name in options.arch.split(",")]
        variants = default_variants()
        if options.variants:
            variants = [Variant(**fields) for fields in json.loads(options.variants.read_text())]
        if options.output.exists() and any(options.output.iterdir()) and not options.force:
            raise ConfigError(f"{options.output} is not empty; --force writes into it.")
        write_archive(options.output, archs, variants, options.jobs, lambda line: print(line, file=sys.stderr))
    except (ConfigError, TypeError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
