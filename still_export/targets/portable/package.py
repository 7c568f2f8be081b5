"""The portable package, the source of all targets: standard ops and still::* nodes with bodies, weights, text files, manifest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.errors import ConfigError, ModelNotFoundError, UnsupportedError
from still_export.folders.origin import model_license
from still_export.graph.ahead import ahead_states, join_head
from still_export.graph.options import ExportOptions, Progress, silent
from still_export.graph.quantization.forms import EXACT, Form, plan_forms
from still_export.graph.quantization.policy import FLOAT8, Layout, Quantization, parse_budget
from still_export.mixers.cache import state_table
from still_export.models.ahead import PREFIX, SHARED, weight_name
from still_export.models.ambient import plain_torch
from still_export.models.description import describe_model, warn_of_settings
from still_export.models.read.source import find_folder, find_source
from still_export.models.read.tokenizer_file import check_vocabulary, write_tokenizer
from still_export.models.read.weights import is_coded
from still_export.package.chat_format import chat_format
from still_export.package.files import DATA, PORTABLE, RECORDED, VISION, WEIGHTS_HASH, recorded_text
from still_export.package.folder import Package, write_manifest
from still_export.package.refusals import RunError
from still_export.targets.ort.options import OrtOptions
from still_export.targets.ort.target import PREFILL_TOKENS
from still_graphs.conditions import bodies, imported, known_ops, no_functions, still_nodes
from still_graphs.ops import OPS
from still_graphs.passes.attach_functions import attach_functions
from still_graphs.pipelines import Dump, Pass, run_passes
from still_kernels.registry import ties_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from still_export.folders.model import ModelFolder
    from still_export.models.load import Source
    from still_export.models.read.weights import Weight


@plain_torch()
def write_portable(
    options: ExportOptions,
    folder: Path,
    layout: Callable[[str], Layout],
    to: str,
    *,
    files: ModelFolder | None = None,
    check: Callable[[dict[str, Any]], None] = lambda manifest: None,
    command: str = "",
    progress: Progress = silent,
    dump: Dump | None = None,
    holes: set[str] | None = None,
    calibration: dict[str, Any] | None = None,
    origin: dict[str, Any] | None = None,
) -> Package:
    """Read and trace a model, and write the portable package into the existing, empty `folder`.

    Args:
        folder: Folder of the package, which gets no runtime graph yet.
        layout: Form of low-bit weights, by activation type.
        files: The model's files; None: they are opened.
        check: Raises, before tracing, if the target does not support a model with this manifest.
        command: The command line, recorded in the manifest.
        dump: Called with the graph after each pass.
        holes: As of `save_streaming`.
        calibration: The manifest's entry of an export to repeat without its text; only weights in 8 bits follow from it.
        origin: That of an export to repeat, {} if it has none; it is taken where one side states nothing.

    Raises:
        StillExportError: The model cannot be read or exported.
    """
    progress("copying the tokenizer")  # before the weights, so that its working memory is not added to theirs
    files = files or find_folder(options)
    text = _write_text_files(files, folder)
    progress("reading the model")
    source = find_source(options, files)
    head = source.ahead() if source.ahead and options.speculate and not options.adapters else None
    if left_out := source.left_out(ahead=head is None):
        logging.getLogger(__name__).warning("left out, not part of the language model: %s", left_out)
    model = source.outline()
    manifest = {**_describe(model, options, command), **text}
    stated = files.origin if origin is None or (origin and files.origin) else origin
    manifest |= {"origin": stated} if stated else {}
    if text["chat"] is not None or (folder / "tokenizer.json").is_file():
        check_vocabulary(folder, manifest["model"]["vocab_size"])
    if head is not None:
        layers, channels = manifest["model"]["layers"], manifest["model"]["hidden_size"]
        own = ahead_states(state_table(head.config, model.dtype), layers, channels)
        manifest["states"] += [state.to_dict() for state in own]
    cache, dtype = model.config.still.deployment.cache, manifest["model"]["dtype"]
    check(manifest)
    _check_chunk(options.speculate, manifest)
    if options.quantize == FLOAT8 and ties_of(manifest).each:
        raise UnsupportedError(
            f"--quantize {FLOAT8}: layers of this model choose tokens by scores, and codes in e4m3 change more choices than verify accepts "
            "as near ties. Use --quantize int8."
        )
    if cache == "float16" and dtype != "float32":
        raise ConfigError(f"--cache {cache} is for --dtype float32; keys and values of a {dtype} package have 16 bits.")
    warn_of_settings(model.generation_config)
    model.generation_config.save_pretrained(folder)
    planned = _plan_quantization(source, files, head, options, layout(dtype), to, progress, calibration)
    progress("tracing")
    manifest |= _write_graph(source, head, options, folder, progress, manifest, planned, dump, holes)
    if source.vision is not None:
        from still_export.graph.vision import vision_graph
        from still_export.graph.weights_file import save_streaming

        progress("tracing the encoder of images")
        save_streaming(vision_graph(source.vision), folder / VISION, f"{VISION}.data", holes=holes)
        manifest["vision"] = source.vision.settings
    progress("hashing")
    write_manifest(folder, manifest)
    return Package(folder, manifest)


def _write_graph(
    source: Source,
    head: Source | None,
    options: ExportOptions,
    folder: Path,
    say: Progress,
    manifest: dict[str, Any],
    planned: Planned | None,
    dump: Dump | None,
    holes: set[str] | None,
) -> dict[str, Any]:
    """Write graph and weights; returns the manifest's entries for the graph's ops and, if quantized, its weights."""
    from still_export.graph.lower import portable_graph
    from still_export.graph.weights_file import save_streaming
    from still_export.models.read.checkpoint import give_pages_back

    keep = 0 if options.all_logits else 1 + options.speculate
    weights = {**source.weights, **_own(head)}
    lowered = portable_graph(source.outline(), source.weights, keep, ahead=head is not None)
    if head is not None:
        join_head(lowered, portable_graph(head.outline(), head.weights, ahead=True), manifest["model"]["layers"])
    if dump is not None:
        dump("lower_program", lowered)
    entries: dict[str, Any] = {}
    rounded: dict[str, float] = {}
    passes = [
        Pass(attach_functions, "a runtime without kernels runs the bodies", requires=no_functions, ensures=bodies),
    ]
    if planned is not None:
        from still_export.graph.quantization.graph import quantize_graph

        def quantize(graph: ir.Model) -> int:
            found = quantize_graph(graph, weights, planned.roles, planned.policy, planned.forms, rounded)
            entries["quantization"] = {**found, **planned.entry}
            return sum(
                part["weights"] for role in entries["quantization"]["roles"].values() for part in role if part["method"]
            )

        passes.insert(0, Pass(quantize, "fewer bits are asked for", requires=known_ops, ensures=imported))
    run_passes(lowered, passes, dump)
    entries["ops"] = {
        **manifest["ops"],
        **{n: OPS[n].version for n in sorted({node.op_type for node in still_nodes(lowered)})},
    }
    # In the manifest these are covered by a hash; here an edit would go unnoticed.
    lowered.metadata_props.clear()
    lowered.metadata_props.update(
        {
            field: recorded_text({**manifest, **entries}, name)
            for field, name in RECORDED.items()
            if field != WEIGHTS_HASH
        }
    )
    if licence := model_license(manifest.get("origin", {})):
        lowered.metadata_props["model_license"] = licence  # ONNX's name

    def written(done: int, total: int) -> None:
        give_pages_back()
        say("writing the weights", done, total)

    save_streaming(lowered, folder / PORTABLE, DATA, written, holes)
    if coded := sum(map(is_coded, weights.values())):
        exact = [part for role in entries.get("quantization", {}).get("roles", {}).values() for part in role]
        exact_count = sum(part["weights"] for part in exact if part["method"] == EXACT)
        floats = coded - exact_count - len(rounded)
        entries["source_codes"] = {"exact": exact_count, "floats": floats, "rounded": dict(sorted(rounded.items()))}
    return entries


@dataclass(frozen=True)
class Planned:
    """The plan of quantization: roles and forms of weights by name, the policy, and further fields of the manifest entry."""

    roles: dict[str, str]
    forms: dict[str, Form]
    policy: Quantization
    entry: dict[str, Any]


def _own(head: Source | None) -> dict[str, Weight]:
    """Weights that a head does not share with its model, by name."""
    weights = {} if head is None else head.weights
    return {weight_name(name): weight for name, weight in weights.items() if name not in SHARED}


def _plan_quantization(
    source: Source,
    files: ModelFolder,
    head: Source | None,
    options: ExportOptions,
    layout: Layout,
    to: str,
    progress: Progress,
    calibration: dict[str, Any] | None,
) -> Planned | None:
    """The forms of the weights, calibrated if requested; None: they are not quantized."""
    if (policy := options.quantization(layout, to)) is None:
        return None
    from still_export.models.read.roles import weight_roles

    model, own = source.outline(), _own(head)
    roles = weight_roles(model)
    if head is not None:
        of_head = weight_roles(head.outline())
        roles |= {name: of_head[name.removeprefix(PREFIX)] for name in own}
    policy, forms = plan_forms({**source.weights, **own}, roles, policy)
    if not options.calibrates:
        return Planned(roles, forms, policy, {})
    from still_export.graph.quantization.calibrate import calibrate, calibrated_forms, read_rows

    if calibration is not None:
        own_forms = {name: form for name, form in forms.items() if name in own}
        forms = calibrated_forms(forms, calibration.get("eight_bits") or ())
        return Planned(roles, {**forms, **own_forms}, policy, {"calibration": calibration})
    texts = read_rows(options.calibrate, files.tokenizer, int(model.config.vocab_size))
    budget = None if options.quantize_budget is None else parse_budget(options.quantize_budget)
    measured = {name: form for name, form in forms.items() if name not in own}
    measured, calibration = calibrate(source, measured, policy, texts, budget, progress)
    return Planned(roles, {**forms, **measured}, policy, {"calibration": calibration})


def _describe(model: Any, options: ExportOptions, command: str) -> dict[str, Any]:
    """The manifest's description of `model`."""
    described = describe_model(model)
    return {
        "target": "onnx",
        "command": command,
        "config": {**asdict(options), "overlays": list(options.overlays), **OrtOptions().config()},
        **described,
        "model": {
            **described["model"],
            "linearized": not options.attach_untrained,
            "all_logits": options.all_logits,
        },
        "prefill_tokens": PREFILL_TOKENS,
        **({"speculate": options.speculate} if options.speculate else {}),
    }


def _check_chunk(guesses: int, manifest: dict[str, Any]) -> None:
    """Raise ConfigError if a chunk is shorter than the guesses (tokens promoted among them would be guesses themselves) or longer than the
    capacity."""
    chunk = min((s["growth"]["per"] for s in manifest["states"] if s["growth"] and s["growth"]["lag"]), default=None)
    if chunk is None:
        return
    if guesses > chunk:
        raise ConfigError(f"--speculate {guesses} is more than a chunk of this model, {chunk} tokens. Guess fewer.")
    capacity = manifest["capacity"]
    if capacity["bounded"] and capacity["capacity_tokens"] < chunk:
        tokens = capacity["capacity_tokens"]
        raise ConfigError(
            f"--capacity-tokens {tokens} is less than a chunk of this model, {chunk} tokens. Choose more."
        )


def _write_text_files(files: ModelFolder, folder: Path) -> dict[str, Any]:
    """Write tokenizer, generation configuration and chat template; returns the manifest's chat templates."""
    try:
        tokenizer = files.tokenizer
    except ModelNotFoundError as error:  # the model has no tokenizer
        logging.getLogger(__name__).warning("%s The package accepts token ids only.", error)
        return {"chat": None}
    write_tokenizer(tokenizer, folder, files.name)
    found = chat_format(tokenizer)
    if found is None:
        return {"chat": None}
    start = ""
    try:
        found.render([{"role": "user", "content": "Hello."}])
        start = found.start()
    except RunError as error:
        logging.getLogger(__name__).warning("for a single message, %s", error)
    return {"chat": {**found.to_dict(), "start": start}}
