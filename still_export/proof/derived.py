"""Export again with a package's recorded options and compare: files, graphs, manifest. What follows from the model is not believed.

The weights themselves are not read here; held_weights.py compares them with the model's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.errors import StillExportError
from still_export.package.files import DATA, MANIFEST, PLUGIN, PORTABLE, sha256
from still_export.package.folder import GENERATED, Package, tool_versions
from still_export.proof.answers import Progress, silent
from still_export.proof.verdict import Check, Verdict

if TYPE_CHECKING:
    import onnx

    from still_export.graph.options import ExportOptions
    from still_export.targets.export import Job

FILES, GRAPHS, DESCRIBED, MANIFEST_IS = (
    "every file is what an export of the model writes",
    "every graph is the model's, node by node",
    "manifest.json describes the model",
    "manifest.json is what an export of the model writes",
)
STRUCTURE = "the graph's structure"
GIVEN = (*GENERATED, "command", "config", "native", "engines", "plugins", "portable")
"""Members of a manifest that say how it was made, and those that are compared apart."""
COMPILED = (PLUGIN, "still_run", "kernels.bin")
"""Beginnings of the names of files that a compiler wrote."""
DESCRIPTION = ("model", "still", "capacity", "states", "feeding", "vision", "speculate", "eos_token_ids", "chat")
"""Members of a manifest that any version derives alike."""
SHOWN = 100
"""Characters of a value that a message shows."""


@dataclass
class Derived:
    """What a package was compared with.

    Args:
        compared: Initializers of its graphs that were compared bit by bit.
    """

    verdict: Verdict = field(default_factory=Verdict)
    compared: set[str] = field(default_factory=set)


def check_derived(package: Package, options: ExportOptions, say: Progress = silent) -> Derived:
    """Export again with `options` and compare with the package.

    Args:
        options: Those that the package records, with the user's own model and overlays.

    Returns:
        Checks; if other versions made the package and the result differs, the structure is among what was not asked.

    Raises:
        ModelNotFoundError: The model is not there.
    """
    manifest = package.manifest
    made = {name: (manifest["versions"].get(name), here) for name, here in tool_versions().items() if name != "python"}
    other = [f"{name} {was or 'missing'}, here {here}" for name, (was, here) in made.items() if was != here]
    found = Derived()
    if reason := _not_here(manifest):
        found.verdict.not_asked.append(f"{STRUCTURE}: {reason}")
        return found
    ways = [None, *_narrowed(manifest)]
    for number, narrow in enumerate(ways):
        tried = _derive(package, options, narrow, say)
        if all(check.passed for check in tried.verdict.checks) or number == len(ways) - 1:
            found.compared = tried.compared
            found.verdict.not_asked += tried.verdict.not_asked
            return _judged(found, tried.verdict.checks, other)
    raise AssertionError("a way is always tried")


def _narrowed(manifest: dict[str, Any]) -> list[str]:
    """The type that `lower --dtype` may have narrowed the package to: its values have other names than in an export in that type."""
    from still_export.targets.portable.narrow import demand_narrow

    dtype, config = manifest["model"]["dtype"], manifest["config"]
    wide = {**manifest, "model": {**manifest["model"], "dtype": "float32"}}
    if config["dtype"] != dtype or dtype == "float32":
        return []
    try:
        demand_narrow(wide, dtype)
    except StillExportError:
        return []
    return [dtype]


def _derive(package: Package, options: ExportOptions, narrow: str | None, say: Progress) -> Derived:
    """Export again and compare; `narrow`: in float32, then narrowed to this type."""
    manifest, found = package.manifest, Derived()
    with tempfile.TemporaryDirectory(prefix="still-derived-") as scratch:
        folder = Path(scratch)
        try:
            from still_export.targets.export import derive

            holes, rewritten = derive(
                _job(manifest, options if narrow is None else replace(options, dtype="float32")),
                folder,
                manifest.get("portable"),
                (manifest.get("quantization") or {}).get("calibration"),
                narrow,
                manifest.get("origin"),
                lambda step, *_: say(f"exporting again: {step}", 0, 0),
            )
        except (StillExportError, ValueError, TypeError, KeyError) as error:
            wrong = [(MANIFEST, f"an export with its options ends with: {' '.join(str(error).split())[:300]}")]
            found.verdict.checks.append(Check.of(FILES, wrong))
            return found
        say("comparing with a new export", 0, 0)
        compiled, fresh = _compiled(manifest), Package(folder, _read(folder))
        checks = found.verdict.checks
        checks.append(Check.of(FILES, list(_other_files(package, fresh, compiled))))
        checks.append(Check.of(GRAPHS, list(_other_graphs(package, fresh, holes, found.compared))))
        described = list(_other_members(manifest, fresh.manifest, DESCRIPTION))
        checks.append(Check.of(DESCRIBED, [(MANIFEST, line) for line in described]))
        fields = [] if described else list(_other_fields(package, fresh, rewritten))
        checks.append(Check.of(MANIFEST_IS, [(MANIFEST, line) for line in fields]))
        if rewritten:
            found.verdict.not_asked.append(
                "the manifest's hash of the portable package: this target wrote its weights anew"
            )
        if unknown := [name for name in sorted(compiled) if not _is_own(package, name)]:
            found.verdict.not_asked.append(
                f"compiled code byte by byte ({', '.join(unknown[:4])}): no other build of it is here"
            )
    return found


def _judged(found: Derived, checks: list[Check], other: Sequence[str]) -> Derived:
    """Keep the checks; if other versions made the package and one fails, only that the manifest describes the model."""
    wrong = next((check for check in checks if not check.passed), None)
    if wrong is None or not other:
        found.verdict.checks += checks
        return found
    found.compared.clear()
    found.verdict.checks += [check for check in checks if check.name == DESCRIBED]
    found.verdict.not_asked.append(
        f"{STRUCTURE}, programs and tokenizer files, byte by byte: other versions made the package ({', '.join(other[:3])}), "
        f"and a new export differs ({wrong.where}: {wrong.what})"
    )
    return found


def _not_here(manifest: Mapping[str, Any]) -> str:
    """Why the package cannot be derived on this machine; empty: it can."""
    from still_export.targets.ort.library import find_library

    native, config = manifest.get("native"), manifest["config"]
    if native and not config.get("archs") and find_library(config.get("cpu")) is None:
        return "the kernels that shape the graph are not built here; build them: still-export doctor --fix"
    return ""


def _job(manifest: dict[str, Any], options: ExportOptions) -> Job:
    """The export that the manifest describes, of the user's model."""
    from still_export.targets.export import Job, plan_job
    from still_export.targets.registry import targets_of

    job = plan_job(None, {"dtype": manifest["model"]["dtype"]}, manifest)
    target_options = job.options
    native = getattr(target_options, "native", False)
    if native is not False and not manifest.get("native") and not target_options.archs:
        target_options = replace(target_options, native=False, cpu=None)  # made where there were no kernels
    # Of several records of a target this machine's headers choose one; the package's own passes say which made it.
    made_by = set((manifest.get(str(manifest["target"])) or {}).get("passes") or ())
    records = [t.name for t in targets_of(job.to) if made_by <= {each.name for each in t.passes}]
    return Job(options, records[0] if made_by and len(records) == 1 else job.to, target_options)


def _read(folder: Path) -> dict[str, Any]:
    from still_export.package.checked import read_manifest

    return read_manifest(folder)


def _compiled(manifest: Mapping[str, Any]) -> set[str]:
    """Files that a compiler or an engine builder wrote."""
    named = {(manifest.get("native") or {}).get("library"), *(entry["file"] for entry in manifest.get("engines", ()))}
    named |= set(manifest.get("plugins", {}).values())
    return {name for name in manifest["files"] if name in named or name.startswith(COMPILED)}


def _is_own(package: Package, name: str) -> bool:
    """Whether a native library is the one that this machine built."""
    from still_export.targets.ort.library import find_library

    here = find_library(package.manifest["config"].get("cpu"))
    return here is not None and sha256(here) == package.manifest["files"][name]["sha256"]


def _other_files(package: Package, fresh: Package, compiled: set[str]) -> Iterator[tuple[str, str]]:
    """Files that only one side has, and those with other bytes; graphs and weights are compared apart."""
    found, right = set(package.manifest["files"]) - compiled, set(fresh.manifest["files"])
    for name in sorted(found ^ right):
        yield name, "no export of the model writes it" if name in found else "it is missing"
    for name in sorted(found & right):
        if name.endswith((".onnx", ".data")):
            continue
        if (package.path / name).read_bytes() != (fresh.path / name).read_bytes():
            yield name, "it has other bytes; export the model again"


def _other_graphs(package: Package, fresh: Package, holes: set[str], compared: set[str]) -> Iterator[tuple[str, str]]:
    """Differences of graphs, with the constants in their files; adds the names of compared constants."""
    import onnx

    for name in sorted({n for n in fresh.manifest["files"] if n.endswith(".onnx")} & set(package.manifest["files"])):
        found, right = (onnx.load(each.path / name, load_external_data=False) for each in (package, fresh))
        yield from ((name, line) for line in _differences(found, right, ""))
        for one, other in zip(found.graph.initializer, right.graph.initializer, strict=False):
            if one.name != other.name or one.name in holes:
                continue
            if _bytes(one, package.path) != _bytes(other, fresh.path):
                yield name, f"the constant {one.name} has other numbers"
            compared.add(one.name)


def _bytes(tensor: onnx.TensorProto, folder: Path) -> bytes:
    """The bytes of an initializer in a file; empty: it is in the graph."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries:
        return b""
    with (folder / entries["location"]).open("rb") as file:
        file.seek(int(entries.get("offset", 0)))
        return file.read(int(entries["length"])) if "length" in entries else file.read()


def _differences(found: Any, right: Any, place: str) -> Iterator[str]:
    """The first difference of two messages, by name of the part."""
    if found == right or found.SerializeToString(deterministic=True) == right.SerializeToString(deterministic=True):
        return
    for descriptor in right.DESCRIPTOR.fields:
        one, other = getattr(found, descriptor.name), getattr(right, descriptor.name)
        if descriptor.type != descriptor.TYPE_MESSAGE:
            if one != other:
                yield f"{place or 'the model'}: {descriptor.name} is {_shown(one)}, in a new export {_shown(other)}"
                return
            continue
        repeated = hasattr(one, "__len__")
        pairs = list(zip(one, other, strict=False)) if repeated else [(one, other)]
        for number, (a, b) in enumerate(pairs):
            named = getattr(a, "name", "") or (str(number) if repeated else "")
            kind = f"{descriptor.name} {named}".strip()
            inner = next(_differences(a, b, f"{place}, {kind}" if place else kind), None)
            if inner is not None:
                yield inner
                return
        if repeated and len(one) != len(other):
            longer, who = (one, "has") if len(one) > len(other) else (other, "lacks")
            extra = longer[len(pairs)]
            named = getattr(extra, "name", "") or getattr(extra, "op_type", "") or str(len(pairs))
            yield f"{place or 'the model'}: it {who} the {descriptor.name} {named}"
            return
    yield f"{place or 'the model'}: a field of a later format"


def _other_fields(package: Package, fresh: Package, rewritten: bool) -> Iterator[str]:
    """Members of the manifest that are not the derived ones."""
    found, right = package.manifest, dict(fresh.manifest)
    names = [name for name in dict.fromkeys((*right, *found)) if name not in GIVEN]
    yield from _other_members(found, right, names)
    weights = found["files"].get(DATA, found["files"].get(PORTABLE))
    if not rewritten and weights is not None and found.get("portable") != weights["sha256"]:
        yield f"portable is {_shown(found.get('portable'))}, the hash of the weights {_shown(weights['sha256'])}"


def _other_members(found: Mapping[str, Any], right: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield from _other_values(_without_rounded(name, found.get(name)), _without_rounded(name, right.get(name)), name)


def _without_rounded(name: str, value: Any) -> Any:
    """`source_codes` without what only reading weights tells."""
    return {"exact": value["exact"]} if name == "source_codes" and value else value


def _other_values(found: Any, right: Any, name: str) -> Iterator[str]:
    if found == right or (not found and not right):
        return
    if isinstance(found, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys((*right, *found)):
            yield from _other_values(found.get(key), right.get(key), f"{name}.{key}")
    elif isinstance(found, list) and isinstance(right, list) and len(found) == len(right):
        for number, (a, b) in enumerate(zip(found, right, strict=True)):
            yield from _other_values(a, b, f"{name}[{number}]")
    else:
        yield f"{name} is {_shown(found)}, the model's {_shown(right)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
