"""The export verb for ONNX: from a model to a package folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from still_export.errors import ConfigError, ModelNotFoundError, UnsupportedError
from still_export.fields import check_types
from still_export.graph.quantization.policy import DEFAULT_LORA, DEFAULT_METHOD, GPU, Quantization
from still_export.mixers.config import DEPLOYMENT, StillConfig
from still_export.models.description import describe_model
from still_export.package.chat_format import chat_format
from still_export.package.folder import MANIFEST, MODEL, Package, open_package, staged_folder, write_manifest
from still_export.package.trust import trust
from still_export.runtime.bundle import write_programs
from still_export.runtime.ort import RECORDED, recorded_text
from still_export.targets.ort.library import CPUS, build_library, demand_build, find_library
from still_graphs.ops import DOMAIN, FUSED_OPSET, OPS, OPSET

if TYPE_CHECKING:
    from still_export.models.load import Source
    from still_export.models.weights import Weights

PREFILL_TOKENS, GPU_PREFILL_TOKENS, GPU_PREFILL_NUMBERS = 512, (2048, 8192), 1 << 23
"""Tokens of one prefill call: longer ones take more memory and are not faster on CPUs; shorter ones keep a GPU waiting for its host. There
a call has so many numbers of a hidden state, within those tokens: 8,192 tokens of a hidden size up to 1,024, 2,048 from 4,096 on
(docs/notebook/onnxruntime.md)."""

NATIVE_DTYPES = ("float32", "float16")
"""What the native kernel computes; the rest of a model in bfloat16 would not run on ONNX Runtime's CPU provider either."""


GPU_PRODUCTS = "float16"
"""What the library's products with quantized weights compute on GPUs; other types have ONNX Runtime's own."""


class Progress(Protocol):
    """Told each step, and of those that count bytes how many are done and how many there are."""

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None: ...


def silent(step: str, done: int = 0, total: int = 0) -> None:
    """A Progress that tells nobody."""


@dataclass(frozen=True)
class ExportOptions:
    """What an export is asked for; `--config manifest.json` repeats it.

    Args:
        model: Folder, hub id or GGUF file.
        attach_untrained: Give a plain softmax model untrained STILL attention.
        dtype: Of the weights: float32, float16, bfloat16, or auto = as stored, but bfloat16 as float32.
        all_logits: Logits of every position instead of each row's last new token.
        overlays: Adapters or feature maps to add.
        revision: Of a hub id.
        native: Put the kernels for CPUs into the package: True builds them where they are not there yet, None takes those that are there.
        cpu: Processors that they are for, of CPUS; None: this machine's.
        archs: GPUs that its library has kernels for too, such as "sm_90".
        still: Fields of the STILL configuration: those of DEPLOYMENT of any model, others of models that do not carry one.
        prefill_tokens: Tokens of one prefill call; None = PREFILL_TOKENS, with `archs` as many as the hidden size asks for.
        opset: Of ai.onnx in the graph: 23, or 27, which has linear attention and its convolution as ops of its own; no other domain's
            ops are in the graph then but still's, which have bodies.
        quantize: Scheme of the weights' bits (quantization/policy.py); None: as `dtype` says.
        quantize_method, quantize_block, lora: With it: who rounds, how many weights share a scale, how LoRA pairs are kept.
        adapters: Let products take a LoRA adapter while the package runs (`run --adapter`).
    """

    model: str
    attach_untrained: bool = False
    dtype: str = "auto"
    all_logits: bool = False
    overlays: tuple[str, ...] = ()
    revision: str | None = None
    native: bool | None = None
    cpu: str | None = None
    archs: tuple[str, ...] = ()
    still: dict[str, Any] = field(default_factory=dict)
    prefill_tokens: int | None = None
    opset: int = OPSET
    quantize: str | None = None
    quantize_method: str | None = None
    quantize_block: int | None = None
    lora: str | None = None
    adapters: bool = False

    def __post_init__(self) -> None:
        if self.quantize is None and (self.quantize_method or self.quantize_block or self.lora or self.adapters):
            raise ConfigError("--quantize-method, --quantize-block, --lora and --adapters are for --quantize.")
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise ConfigError(f"prefill_tokens={self.prefill_tokens}; it must be at least 1.")
        if self.opset not in (OPSET, FUSED_OPSET):
            raise ConfigError(f"--opset {self.opset}: graphs are written at opset {OPSET} or {FUSED_OPSET}.")
        if self.opset != OPSET and self.quantize:
            raise ConfigError(f"--opset {self.opset} is not for --quantize, whose products are ONNX Runtime's own op.")
        if self.native is False and (self.archs or self.cpu):
            raise ConfigError(
                "--no-native leaves the kernels out that --arch and --cpu are for; give one or the other."
            )
        if self.archs and self.cpu:
            raise ConfigError("--arch compiles kernels for this kind of machine alone: leave out --cpu.")
        if self.cpu not in (None, *CPUS):
            raise ConfigError(f"--cpu {self.cpu} is unknown; known: {', '.join(CPUS)}.")

    def still_config(self) -> StillConfig | None:
        """The STILL configuration asked for, None where nothing was."""
        trained = {name: value for name, value in self.still.items() if name not in DEPLOYMENT}
        return StillConfig.from_dict(trained) if trained else None

    def quantization(self, target: str) -> Quantization | None:
        """How weights are quantized for `target`, None: not.

        Raises:
            ConfigError: The scheme, method or block size is unknown, or not one of the target.
        """
        if self.quantize is None:
            return None
        method, lora = self.quantize_method or DEFAULT_METHOD, self.lora or DEFAULT_LORA
        return Quantization(self.quantize, method, self.quantize_block or 0, lora, target, self.adapters)

    def deployment(self) -> dict[str, Any]:
        """What is asked of any model's STILL configuration."""
        return {name: value for name, value in self.still.items() if name in DEPLOYMENT}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> ExportOptions:
        """The options that a manifest records.

        Raises:
            ConfigError: It records none.
        """
        try:
            values = dict(manifest["config"])
            check_types(cls, values, f"{MANIFEST}: config", ConfigError)
            values |= {name: tuple(values.get(name, ())) for name in ("overlays", "archs")}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{MANIFEST}: config is no export configuration that this version reads: {error}."
            ) from error


def find_source(options: ExportOptions) -> Source:
    """The model that `options` describe, its weights unread."""
    import torch

    from still_export.models.load import open_source, source_dtype

    dtype = options.dtype
    if dtype == "auto" and source_dtype(options.model, options.revision) == torch.bfloat16:
        # Most checkpoints are stored so, and ONNX Runtime's CPU provider has no bfloat16: the package would run almost nowhere.
        dtype = "float32"
    return open_source(
        options.model,
        attach_untrained=options.attach_untrained,
        still_config=options.still_config(),
        deployment=options.deployment(),
        overlays=options.overlays,
        dtype=dtype,
        revision=options.revision,
    )


def load_source(options: ExportOptions) -> Any:
    """The PyTorch model that `options` describe."""
    return find_source(options).read()


def export_onnx(
    options: ExportOptions,
    target: Path,
    *,
    force: bool = False,
    command: str = "",
    progress: Progress | None = None,
    onnxruntime_include: Path | None = None,
    final: str = "onnx",
) -> Package:
    """Export a model to a package for ONNX Runtime.

    Args:
        options: What to export and how.
        target: The package folder; written whole or not at all.
        force: Replace `target`.
        command: The command line, for the manifest.
        progress: Told each step.
        onnxruntime_include: Folder of ONNX Runtime's C headers for a native kernel; None looks in the usual places.
        final: Of policy.LAYOUTS: what the graph is lowered to afterwards. For "onnx" ONNX Runtime's own ops are used where they are
            faster; for others it has standard ops, and weights as the target holds them.

    Returns:
        The package.

    Raises:
        StillExportError: The model cannot be read or exported, or the package cannot be written.
    """
    say, asked = progress or silent, options.quantization(final)
    with staged_folder(target, force) as folder:
        say("copying the tokenizer")  # before the weights: its own work memory would come on top of them
        text = _write_text_files(options, folder)
        library = _library(options, onnxruntime_include, say) if final == "onnx" else None
        say("reading the model")
        source = find_source(options)
        model = source.outline()
        describe = {**_describe(model, options, command), **text}
        cache, dtype = model.config.still.deployment.cache, describe["model"]["dtype"]
        if options.native and not options.archs and dtype not in NATIVE_DTYPES:
            raise UnsupportedError(
                f"--native computes {' and '.join(NATIVE_DTYPES)}, not {dtype}. Export with --dtype float32, "
                "without --native, or with --arch for GPUs."
            )
        if cache == "float16" and dtype != "float32":
            raise ConfigError(
                f"--cache {cache} is for --dtype float32; keys and values of a {dtype} package have 16 bits."
            )
        if cache == "int8" and options.native and not options.archs and dtype != "float32":
            raise ConfigError(f"--cache int8 with --native is for --dtype float32, not for {dtype}.")
        if dtype not in NATIVE_DTYPES or (cache == "int8" and dtype != "float32"):
            library = None
        model.generation_config.save_pretrained(folder)
        say("tracing")
        if options.archs and final == "onnx" and describe["model"]["dtype"] == GPU_PRODUCTS:
            asked = options.quantization(GPU)
        describe |= _write_model(model, source.weights, options, folder, say, describe, final, asked)
        native = _write_native(options, folder, library, onnxruntime_include, say)
        write_programs(folder, ["ort"])
        say("hashing")
        write_manifest(folder, {**describe, **native})
    return open_package(target, check_hashes=False)


def _library(options: ExportOptions, include: Path | None, say: Progress) -> Path | None:
    """The library of kernels that the package takes, before anything large is read; None: it takes none, or one linked for it."""
    if options.archs:
        demand_build(include)
        return None
    if options.native or options.cpu:
        say("building the kernels")
        return build_library(options.cpu, include)
    return find_library() if options.native is None else None


def _write_native(
    options: ExportOptions, folder: Path, library: Path | None, include: Path | None, say: Progress
) -> dict[str, Any]:
    """Write the kernels' library, and what the manifest says of it; nothing where there is none."""
    if library is None and not options.archs:
        return {}
    from still_export.targets.ort.kernels import add_native

    if options.archs:
        say("compiling the GPU kernels")
    description = add_native(folder, library, options.cpu, include, options.archs)
    trust(folder / description["library"])
    return {"native": description}


def _write_model(
    model: Any,
    weights: Weights,
    options: ExportOptions,
    folder: Path,
    say: Progress,
    describe: dict[str, Any],
    final: str,
    asked: Quantization | None,
) -> dict[str, Any]:
    """Write graph and weights; what the manifest says of the graph's ops, and of the weights' quantization where there is one."""
    import onnx

    from still_export.graph.fuse import fuse_nodes
    from still_export.graph.lower import lower_program, part_scales
    from still_export.graph.merge import MERGES_NONE, THREE, merge_products
    from still_export.graph.trace import trace_model
    from still_export.graph.weights_file import save_streaming
    from still_export.targets.trt8.norms import norm_in_place
    from still_graphs.passes.attach_functions import attach_functions
    from still_graphs.pipelines import ORT_CUDA, run_pipeline

    traced = trace_model(model, all_logits=options.all_logits)
    say("lowering to ONNX")
    lowered = lower_program(traced, weights)
    if final == "onnx":
        part_scales(lowered)
    own = final == "onnx" and options.opset == OPSET
    if final == "trt-8":
        norm_in_place(lowered)
    if own:
        fuse_nodes(lowered)
    if not asked:  # quantized weights of one value are one already
        if own and options.archs:
            merge_products(lowered, THREE)
        elif final in MERGES_NONE:
            merge_products(lowered)
    said: dict[str, Any] = {}
    if asked:
        from still_export.graph.quantization.graph import quantize_graph
        from still_export.models.roles import weight_roles

        said = {"quantization": quantize_graph(lowered, weights, weight_roles(model), asked)}
    path = folder / MODEL
    save_streaming(lowered, path, f"{MODEL}.data", lambda done, total: say("writing the weights", done, total))
    graph = onnx.load(path, load_external_data=False)
    next(o for o in graph.opset_import if o.domain == "").version = options.opset
    if own and options.archs:
        run_pipeline(graph, ORT_CUDA)
    ours = {node.op_type for node in graph.graph.node if node.domain == DOMAIN}
    said["ops"] = {**describe["ops"], **{name: OPS[name].version for name in sorted(ours)}}
    attach_functions(graph, onnxruntime=own)
    # Beside the manifest, where an edit would go unnoticed.
    onnx.helper.set_model_props(
        graph, {field: recorded_text({**describe, **said}, name) for field, name in RECORDED.items()}
    )
    onnx.save(graph, path)
    return said


def _describe(model: Any, options: ExportOptions, command: str) -> dict[str, Any]:
    """The manifest's account of `model`."""
    described = describe_model(model)
    return {
        "target": "onnx",
        "command": command,
        "config": {**asdict(options), "overlays": list(options.overlays), "archs": list(options.archs)},
        **described,
        "model": {
            **described["model"],
            "linearized": not options.attach_untrained,
            "all_logits": options.all_logits,
        },
        "prefill_tokens": options.prefill_tokens or _prefill_tokens(options, described["model"]["hidden_size"]),
    }


def _prefill_tokens(options: ExportOptions, hidden_size: int) -> int:
    if not options.archs:
        return PREFILL_TOKENS
    least, most = GPU_PREFILL_TOKENS
    return max(least, min(most, 1 << (GPU_PREFILL_NUMBERS // hidden_size).bit_length() - 1))


def _write_text_files(options: ExportOptions, folder: Path) -> dict[str, Any]:
    """Tokenizer, generation configuration and chat template; the manifest's chat format."""
    from still_export.models.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(options.model, options.revision)
    except ModelNotFoundError:
        return {"chat": None}  # a model without text: the package runs on token ids
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedError(
            f"the tokenizer of {options.model} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "convert it to a fast tokenizer first."
        )
    return {"chat": chat_format(tokenizer)}
