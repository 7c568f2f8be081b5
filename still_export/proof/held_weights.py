"""Compare every weight of a package with the model's, before anything runs.

A float weight equals the source's in the package's type, bit by bit. Codes of a method that rounds to nearest decode to numbers within half
a step of the source's. Codes copied from the source decode to the same numbers. A method that searches codes (gptq) loses at most LOST
times as much as plain rounding, block by block and row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import Tensor

from still_export.graph.quantization.forms import CODES, FLOAT8_CODES, K_QUANT, ROWS
from still_export.graph.quantization.policy import DEFAULT_METHOD
from still_export.graph.quantization.read import row_readers
from still_export.models.ahead import weight_name
from still_export.models.read.weights import TOGETHER, Deferred, Weight, Weights, is_coded, value_of
from still_export.package.files import HEAD, MODEL, VISION
from still_export.proof.node_reads import unread_initializers
from still_export.proof.verdict import Check, Verdict

if TYPE_CHECKING:
    import onnx_ir as ir

    from still_export.models.load import Source

NAME, READ = "every weight is the model's", "every stored weight is read by nodes that an output depends on"
SLAB = 1 << 22
"""Numbers compared at a time."""
SIDE_BY_SIDE = "+"
"""Separator of names of float weights that are concatenated along the outputs (graph/merge.py)."""
HALF_STEP = 0.5
"""Largest error of rounding to nearest, in steps."""
LAST_CODE = 1.0
"""Largest error in steps at the end of the 8-bit range: the other extreme of a block has the code -128."""
COARSER = 1.1
"""Allowed ratio of a step to plain rounding's."""
LOST = 3.0
"""Allowed loss of a method that searches codes, in multiples of plain rounding's loss over a block or row. Codes one step off lose 3.5
times as much, a block of zeros 9 times."""


@dataclass(frozen=True)
class Stored:
    """A weight as a package has it.

    Args:
        rows: Reads rows of it as the model has it, [n, K] or of its own shape.
        kind: "float", "codes", "e4m3" or "k_quant".
        step: Reads the steps [n, blocks] of the rows' codes.
        bits: Of its codes.
        unit: Relative rounding of what the step is stored in.
        least: Rounding of a step, and of the weight itself, that is too small for that: float16's below 6e-5.
        place: File and offset of its bytes; None: in the graph itself.
    """

    rows: Callable[[slice], Tensor]
    kind: str
    step: Callable[[slice], np.ndarray] | None = None
    bits: int = 0
    unit: float = 0.0
    least: float = 0.0
    place: tuple[object, ...] | None = None


@dataclass(frozen=True)
class Finding:
    """The worst number of a wrong weight."""

    graph: str
    name: str
    place: tuple[int, ...]
    found: float
    right: float
    bound: float
    count: int

    def __str__(self) -> str:
        if not self.place:
            return f"{self.name} in {self.graph}: {self.found:.3g} times what plain rounding loses, at most {self.bound:.3g}"
        return (
            f"{self.name}{list(self.place)} in {self.graph} is {self.found:.6g}, the model's {self.right:.6g}, which may differ by "
            f"{self.bound:.2g}; {self.count:,} numbers of it are off"
        )


def check_weights(
    folder: Path,
    manifest: Mapping[str, Any],
    source: Source,
    say: Callable[[str, int, int], None] = lambda *_: None,
    compared: Collection[str] = (),
) -> Verdict:
    """Compare every weight of every graph of a package with the model's.

    Args:
        say: Called with (step, number of weights done, number of weights).
        compared: Initializers that were compared otherwise.

    Returns:
        Two checks: every weight is the model's, with the worst number of the worst weight; and every weight is read. What nodes read and
        is no weight of the model is among what was not asked.

    Raises:
        CheckpointError: A weight of the model is damaged.
    """
    verdict, findings, seen = Verdict(), list[Finding](), dict[tuple[str, object], None]()
    graphs = [MODEL, *(n for n in manifest["files"] if n.endswith(".onnx") and n not in (MODEL, VISION))]
    judge = _Judge(manifest)
    missing: dict[str, None] = {}
    unread, unknown = list[tuple[str, str]](), dict[str, None]()
    head = source.ahead() if HEAD in manifest["files"] and source.ahead is not None else None
    for graph in graphs:
        weights = {} if graph == HEAD else {weight_name(name, False): each for name, each in source.weights.items()}
        if head is not None and graph != MODEL:  # the portable graph contains both
            weights |= {weight_name(name, True): each for name, each in head.weights.items()}
        model = onnx.load(folder / graph, load_external_data=False)
        idle = dict.fromkeys(unread_initializers(model))
        unread += [(graph, f"{graph} has {name}, which no output depends on") for name in idle]
        kept = [t for t in model.graph.initializer if t.external_data and t.name not in compared]
        del model
        stored = stored_weights(folder / graph, manifest, weights)
        unknown |= {t.name: None for t in kept if t.name not in idle and not _is_known(t.name, weights, stored)}
        if graph == MODEL:
            missing = dict.fromkeys(name for name in weights if name not in stored)
        for number, (name, entry) in enumerate(stored.items()):
            say("comparing weights with the model's", number, len(stored))
            if entry.place is not None and (name, entry.place) in seen:
                continue
            seen[name, entry.place] = None
            if (found := judge.compare(graph, name, entry, weights[name])) is not None:
                findings.append(found)
    findings.sort(key=lambda each: each.count, reverse=True)
    verdict.checks.append(Check.of(NAME, [(each.name, str(each)) for each in findings]))
    verdict.checks.append(Check.of(READ, unread))
    if unknown:
        verdict.not_asked.append(
            f"{len(unknown)} stored tensors by themselves ({_some(unknown)}): the model has none of these names"
        )
    if missing:
        verdict.not_asked.append(
            f"{len(missing)} weights by themselves ({_some(missing)}): {MODEL} has them in another form; its outputs were compared"
        )
    if own := [name for name, weight in source.weights.items() if is_coded(weight)]:
        verdict.not_asked.append(
            f"what codes of the model's own file lose ({len(own)} weights): the float weights that they were made of are not there"
        )
    if VISION in manifest["files"]:
        verdict.not_asked.append(f"the weights of {VISION} by themselves: its outputs were compared")
    return verdict


def _some(names: Collection[str]) -> str:
    return ", ".join([*list(names)[:3], *["..."] * (len(names) > 3)])


def _is_known(name: str, weights: Weights, stored: Collection[str]) -> bool:
    """Whether an initializer is weights of the model, or a part of coded ones."""
    return all(part in weights for part in name.split(SIDE_BY_SIDE)) or all(
        part in stored for part in name.rpartition(".")[0].split(TOGETHER)
    )


def stored_weights(path: Path, manifest: Mapping[str, Any], weights: Weights) -> dict[str, Stored]:
    """The stored weights of a graph by the model's names, for those in `weights`."""
    values = _graph(path).initializers
    parts = {str(name): value.const_value for name, value in values.items() if value.const_value is not None}
    found: dict[str, Stored] = {}
    for name, tensor in parts.items():
        start = 0
        for part in name.split(SIDE_BY_SIDE):
            if part in weights:
                turned = SIDE_BY_SIDE in name or _multiplies(values[name])
                found[part] = _float(tensor, tuple(weights[part].shape), start, turned)
                start += int(weights[part].shape[0])
    quantization = manifest.get("quantization")
    if quantization is None:
        return found
    sizes = {name: int(weight.shape[0]) for name, weight in weights.items() if weight.shape}
    for name, rows in row_readers(path, quantization["block_size"], sizes).items():
        if name in weights:
            found[name] = _coded(name, rows, parts, weights[name], sizes)
    return found


def _graph(path: Path) -> ir.Graph:
    """Weights and nodes of a graph, without value types and function bodies, which are most of it."""
    import onnx_ir as ir

    from still_export.graph.weights_file import locate_weights

    model = onnx.load(path, load_external_data=False)
    model.ClearField("functions")
    model.graph.ClearField("value_info")
    graph = ir.from_proto(model).graph
    locate_weights(graph, path.parent)
    return graph


def _place(tensor: ir.TensorProtocol, *more: object) -> tuple[object, ...] | None:
    """File and offset of a tensor's bytes."""
    where = tuple(getattr(tensor, name, None) for name in ("location", "offset", "length"))
    return None if where[0] is None else (*where, *more)


def _multiplies(value: ir.Value) -> bool:
    """Whether a MatMul reads it as [in, out]."""
    return any(node.op_type in ("MatMul", "FusedMatMul") and index == 1 for node, index in value.uses())


def _float(tensor: ir.TensorProtocol, shape: tuple[int, ...], start: int, turned: bool) -> Stored:
    """A float weight of `shape`; `turned`: stored as [in, out], possibly concatenated with others."""
    stored_shape = tuple(np.asarray(tensor.shape, np.int64).tolist())
    size = shape[0] if shape else 1
    turned = len(shape) == len(stored_shape) == 2 and stored_shape[0] == shape[1] and (turned or stored_shape != shape)

    def rows(span: slice) -> Tensor:
        values = np.asarray(tensor.numpy())
        if turned:
            values = values.T
        elif values.shape != shape:
            values = values.reshape(-1)[: math.prod(shape)].reshape(shape)  # filled up, or an axis of 1 more
        first, last, _ = span.indices(size)
        part = np.array(values[start + first : start + last] if shape else values)
        return torch.from_numpy(part) if part.dtype.kind == "f" else _bfloat16(part)

    return Stored(rows, "float", place=_place(tensor, start))


def _bfloat16(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def _coded(
    name: str,
    rows: Callable[[slice], Tensor],
    parts: Mapping[str, ir.TensorProtocol],
    weight: Weight,
    sizes: Mapping[str, int],
) -> Stored:
    """A quantized weight; `rows` decodes its numbers."""
    ending = ("half", "scales", "outer", *K_QUANT.values())
    full = next(n for n in parts if n.rpartition(".")[2] in ending and name in n.rpartition(".")[0].split(TOGETHER))
    names = full.rpartition(".")[0]
    together = names.split(TOGETHER)
    start = sum(sizes[other] for other in together[: together.index(name)])
    kinds = {
        part: parts[f"{names}.{part}"] for part in (CODES, FLOAT8_CODES, "blocks", ROWS) if f"{names}.{part}" in parts
    }
    place = _place(next(iter(kinds.values()), parts[full]), start, name)
    if full.endswith(".half"):
        return Stored(lambda span: rows(span).half(), "float", place=place)
    if any(f"{names}.{part}" in parts for part in K_QUANT.values()):
        return Stored(rows, "k_quant", unit=2.0**-11, place=place)
    if not kinds:
        return Stored(rows, "codes", unit=2.0**-10, place=place)  # pairs alone
    part, codes = next(iter(kinds.items()))
    scales = parts[f"{names}.scales"]
    outputs = sum(sizes[other] for other in together)
    inputs = int(weight.shape[-1])
    count = math.prod(weight.shape[1:-1], start=outputs)
    bits = codes.nbytes * 8 // (count * inputs)

    def step(span: slice) -> np.ndarray:
        values = np.abs(np.asarray(scales.numpy()).astype(np.float32))
        if part in (CODES, FLOAT8_CODES):
            values = values.reshape(-1, outputs).T
        first, last, _ = span.indices(sizes[name])
        return values[start + first : start + last]

    unit, least = (2.0**-10, 2.0**-25) if np.asarray(scales.numpy()).dtype == np.float16 else (2.0**-20, 0.0)
    return Stored(rows, "e4m3" if part == FLOAT8_CODES else "codes", step, bits, unit, least, place)


class _Judge:
    """Allowed differences of stored weights."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        config = manifest["config"]
        self.method = config.get("quantize_method") or DEFAULT_METHOD
        self.again = (manifest.get("source_codes") or {}).get("rounded", {})
        self.half = manifest["model"]["dtype"] != "float32"

    def searched(self, name: str, stored: Stored, weight: Weight) -> bool:
        """Whether its method searches codes (gptq)."""
        exact = is_coded(weight) and name not in self.again
        return stored.kind == "codes" and 0 < stored.bits < 8 and self.method != DEFAULT_METHOD and not exact

    def compare(self, graph: str, name: str, stored: Stored, weight: Weight) -> Finding | None:
        """The worst number of a weight; None: it equals the model's."""
        if self.searched(name, stored, weight):
            return self._lost(graph, name, stored, weight)
        worst, place, count = (0.0, 0.0, 0.0, 0.0), (), 0
        for rows, right in slabs(weight):
            found = stored.rows(rows)
            allowed = self._allowed(name, stored, weight, right, found, rows)
            if isinstance(allowed, float):
                right = right.to(found.dtype)
                same = (found == right) | (found.isnan() & right.isnan())
                if bool(same.all()):
                    continue
            else:
                same = (found - right).abs() <= allowed  # comparisons with NaN are false
                if bool(same.all()):
                    continue
            found, right = found.float(), right.float()
            error = (found - right).abs().nan_to_num(nan=math.inf).masked_fill(same, -1)
            count += int((~same).sum())
            at = np.unravel_index(int(error.argmax()), error.shape)
            if float(error[at]) > worst[0] or not place:
                bound = allowed if isinstance(allowed, float) else float(allowed.expand_as(error)[at])
                worst = float(error[at]), float(found[at]), float(right[at]), bound
                first = (rows.start + int(at[0]), *map(int, at[1:])) if at else ()
                place = first or (0,)
        return Finding(graph, name, place, *worst[1:], count) if count else None

    def _allowed(
        self, name: str, stored: Stored, weight: Weight, right: Tensor, found: Tensor, rows: slice
    ) -> float | Tensor:
        """Allowed difference of each number; 0.0: equal to the last bit."""
        pairs = isinstance(weight, Deferred) and weight.adapted is not None
        largest = right.abs().amax(-1, keepdim=True)
        if stored.kind == "float":
            return 0.0 if not pairs else largest * _unit(found.dtype)  # sums of an adapter have another order
        coarse = 2.0**-9 if self.half else 2.0**-18
        if stored.kind == "k_quant" or stored.step is None or (is_coded(weight) and name not in self.again):
            return largest * max(coarse, stored.unit if stored.step is None and stored.kind != "k_quant" else 0.0)
        step = torch.from_numpy(stored.step(rows))
        wide = step.repeat_interleave(right.shape[-1] // step.shape[-1], -1).reshape(right.shape)
        if stored.kind == "e4m3":
            return right.abs() * 2.0**-4 * 1.01 + wide * 2.0**-10
        size = right.abs().unflatten(-1, (step.shape[-1], -1)).amax(-1).reshape(step.shape)
        most = COARSER * 2 * size / (2**stored.bits - 2) + 2.0**-23
        off = torch.where(found.abs() >= wide * (2 ** (stored.bits - 1) - 1.5), LAST_CODE, HALF_STEP)
        if stored.bits < 8:
            off = torch.full_like(off, HALF_STEP)
        allowed = wide * off * (1 + 2.0**-10) + found.abs() * stored.unit + largest * (coarse if pairs else 2.0**-20)
        allowed = allowed + stored.least * (1 + off + found.abs() / wide.clamp_min(torch.finfo(torch.float32).tiny))
        coarser = (step > most).repeat_interleave(right.shape[-1] // step.shape[-1], -1).reshape(right.shape)
        return allowed.masked_fill(coarser, -1.0)

    def _lost(self, graph: str, name: str, stored: Stored, weight: Weight) -> Finding | None:
        """For a method that searches codes: their loss next to plain rounding's, by block of inputs and by row."""
        columns: Tensor | float = 0.0
        plain: Tensor | float = 0.0
        worst = 0.0
        for rows, right in slabs(weight):
            assert stored.step is not None
            blocks = stored.step(rows).shape[-1]
            lost = (stored.rows(rows) - right).square().unflatten(-1, (blocks, -1)).sum(-1)
            least = (plainly_rounded(right, blocks, stored.bits) - right).square().unflatten(-1, (blocks, -1)).sum(-1)
            columns, plain = columns + lost.flatten(0, -2).sum(0), plain + least.flatten(0, -2).sum(0)
            worst = max(worst, _ratio(lost.sum(-1), least.sum(-1)))
        assert isinstance(columns, Tensor) and isinstance(plain, Tensor)
        worst = max(worst, _ratio(columns, plain))
        return None if worst <= LOST else Finding(graph, name, (), worst, 0.0, LOST, 1)


def _ratio(lost: Tensor, plain: Tensor) -> float:
    tiny = torch.finfo(torch.float32).tiny
    return float((lost / plain.clamp_min(tiny)).sqrt().nan_to_num(nan=math.inf).max())


def _unit(dtype: torch.dtype) -> float:
    return {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype, 2.0**-18)


def plainly_rounded(values: Tensor, blocks: int, bits: int) -> Tensor:
    """`values` rounded to the nearest of 2^bits levels between the smallest and largest of each block."""
    parts = values.unflatten(-1, (blocks, -1))
    low, high = parts.amin(-1, keepdim=True).clamp_max(0), parts.amax(-1, keepdim=True).clamp_min(0)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / step).round()
    return ((((parts / step).round() + zero).clamp(0, 2**bits - 1) - zero) * step).flatten(-2)


def slabs(weight: Weight) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight in float32, in multiples of 8 blocks."""
    outputs = int(weight.shape[0]) if weight.dim() else 1
    each = max(8, SLAB // max(1, math.prod(weight.shape[1:])) // 8 * 8)
    whole = value_of(weight).detach()
    for start in range(0, outputs, each):
        rows = slice(start, min(start + each, outputs))
        yield rows, (whole[rows] if weight.dim() else whole).float()
