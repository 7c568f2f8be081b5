"""Faults of the native kernels for ONNX Runtime's CPU: changed lines of copies of ops' sources, all in one library, switched on one at a
time."""

import ctypes
import shutil
from pathlib import Path

from still_export.targets.ort.library import LIBRARY, _headers
from still_export.targets.trt.plugins import OP_FOLDERS, SOURCE, run_cmake
from tests.faults.registry import Random, fault

SWITCH = """#pragma once
// Which fault is switched on, from 1, and a number drawn at random that says where.
extern "C" __attribute__((visibility("default"))) int still_fault, still_place;
#define AT(n) (still_place % (n))
#define HALF(x) ([](float wide) { Half half; from_float(wide, &half); return to_float(half); }(x))
"""
EDITS: list[tuple[int, str, str, str]] = []
"""Number of the fault, OP/FILE of the op's folder cpu, the text that is there once, the text in its place."""


def native(name: str, file: str, old: str, new: str, *more: tuple[str, str, str]) -> None:
    """Register a fault by a file, the text that is there and the text in its place, or several. FAULT there: it is switched on; AT(n): a
    place below n; HALF(x): x in half precision."""
    number = 1 + max((edit[0] for edit in EDITS), default=0)
    EDITS.extend((number, *edit) for edit in ((file, old, new), *more))
    folder = file.split("/")[0]

    def plant(random: Random, planted: tuple[Path, set[str]]) -> bool | None:
        library, ops = planted
        if folder.replace("_", "") not in ops:
            return False
        switch(library, number, int(random.integers(1 << 20)))
        return None

    fault("native", f"native: {name}")(plant)


def switch(library: Path, number: int, place: int = 0) -> None:
    """Switch on the fault with this number in a library that `build` made, 0: none."""
    loaded = ctypes.CDLL(str(library))
    ctypes.c_int.in_dll(loaded, "still_fault").value = number
    ctypes.c_int.in_dll(loaded, "still_place").value = place


def patched() -> dict[Path, str]:
    """Sources of ops with all faults in them, by their place below `OP_FOLDERS`.

    Raises:
        ValueError: A line that a fault changes is not there once.
    """
    texts = {}
    for number, name, old, new in EDITS:
        op, _, file = name.partition("/")
        path = Path(op, "cpu", file)
        text = texts.get(path) or '#include "cpu/common/fault.h"\n' + (OP_FOLDERS / path).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name} has {text.count(old)} times what fault {number} changes, instead of once: {old}")
        texts[path] = text.replace(old, new.replace("FAULT", f"(still_fault == {number})"))
    return texts


def build(folder: Path) -> Path:
    """The library with all faults, built in `folder` where it is not there yet; ValueError as of `patched`."""
    library = folder / LIBRARY
    if library.exists():
        return library
    sources, ops = folder / "plugins", folder / "kernels/still_kernels"
    shutil.copytree(SOURCE, sources, dirs_exist_ok=True)
    shutil.copytree(OP_FOLDERS, ops, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in patched().items():
        (ops / path).write_text(text)
    common = sources / "cpu/common"
    (common / "fault.h").write_text(SWITCH)
    kernel = (common / "kernel.cpp").read_text()
    (common / "kernel.cpp").write_text(f'#include "fault.h"\nint still_fault = 0, still_place = 0;\n{kernel}')
    options: dict[str, Path | str | None] = {"ONNXRUNTIME_INCLUDE_DIR": _headers(None).resolve()}
    built = run_cmake(sources, folder / "build", options, "still_onnxruntime") / "onnxruntime" / LIBRARY
    shutil.copyfile(built, library)
    return library


HYBRID, SELECTION, HEAD = (f"hybrid_attention/{name}" for name in ("hybrid_attention.cpp", "selection.h", "head.h"))
ROWS = "hybrid_attention/kernels.cpp"
native(
    "a ring read before it is written",
    HYBRID,
    "void write_ring(Call& call, size_t index, size_t)\n{",
    "void write_ring(Call& call, size_t index, size_t lane)\n{\n    size_t const all = static_cast<size_t>(call.layer.kv_heads);\n"
    "    if (FAULT && lane != 1000 && index % all == AT(all))\n        return;",
    (
        HYBRID,
        "    if (split)\n",
        "    for (size_t i = 0; FAULT && i < rings; ++i)\n        write_ring(call, i, 1000);\n    if (split)\n",
    ),
)
native(
    "promotion a token early",
    HYBRID,
    "s.promotes = s.offset == 0 && s.chunk >= 2;",
    "s.promotes = s.offset == (FAULT && brought[row] == 1 ? l.chunk - 1 : 0)\n"
    "                     && s.chunk >= (FAULT && brought[row] == 1 ? 1 : 2);",
    (HYBRID, "select_tokens(selection, s.chunk - 2,", "select_tokens(selection, s.chunk - (s.offset ? 1 : 2),"),
    (HYBRID, "fill_cache(selection, s.chunk - 2,", "fill_cache(selection, s.chunk - (s.offset ? 1 : 2),"),
    (ROWS, "h.ring(h.current), h.l.chunk, task", "h.ring(h.s.offset ? h.previous : h.current), h.l.chunk, task"),
)
native(
    "the last cached token unseen",
    HYBRID,
    "done[row] += s.count;",
    "done[row] += s.count;\n        s.held -= FAULT && s.held > 0;",
)
native(
    "a sequence counts from the first one's length",
    HYBRID,
    "position = past[row] + done[row]",
    "position = past[FAULT ? 0 : row] + done[row]",
)
native(
    "a head selects by its neighbour's scores",
    SELECTION,
    "l.heads + selection.head * group;",
    "l.heads + (selection.head + (FAULT && selection.head == AT(l.select_heads()))) % l.select_heads() * group;",
)
native(
    "a chunk's last token never selected",
    SELECTION,
    "for (int i = 0; i < l.chunk; ++i)\n            if (!salient[i] && (best",
    "for (int i = 0; i < l.chunk - FAULT; ++i)\n            if (!salient[i] && (best",
)
native(
    "salient tokens of a neighbouring head",
    SELECTION,
    "selection.head / (l.select_heads() / l.kv_heads);",
    "(selection.head / (l.select_heads() / l.kv_heads) + (FAULT && selection.head == AT(l.select_heads()))) % l.kv_heads;",
)
native(
    "the value of a salient token is its neighbour's",
    SELECTION,
    "copy_row(x.window_value, ring_slot + i,",
    "copy_row(x.window_value, ring_slot + (FAULT && i == AT(l.chunk) ? (i + 1) % l.chunk : i),",
)
native(
    "a head reads its neighbour's keys and values",
    HEAD,
    "kv_head(task.head / l.group())",
    "kv_head((task.head / l.group() + (FAULT && task.head == AT(l.heads))) % l.kv_heads)",
)
native(
    "a head with its neighbour's feature map",
    HEAD,
    "l.weight_heads == 1 ? 0 : static_cast<int64_t>(head)",
    "l.weight_heads == 1 ? 0 : static_cast<int64_t>((head + (FAULT && head == AT(l.heads))) % l.heads)",
)
native(
    "a head's linear mass times 1.02",
    HEAD,
    "total + linear_mass + l.epsilon",
    "total + linear_mass * (FAULT && head == AT(l.heads) ? 1.02f : 1.0f) + l.epsilon",
)
native("a salient token summed, too", HEAD, "if (except[i])", "if (except[i] && !(FAULT && head == AT(l.heads)))")
native(
    "the mass lacks a chunk's last token",
    HEAD,
    "sum += phi[static_cast<int64_t>(i) * l.features + f];",
    "sum += FAULT && i + 1 == count ? 0 : phi[static_cast<int64_t>(i) * l.features + f];",
)
native(
    "a linear state accumulated in half precision",
    HEAD,
    "v, v_stride, state(), l.dim, true);",
    "v, v_stride, state(), l.dim, true);\n        for (int i = 0; FAULT && i < l.features * l.dim; ++i)\n"
    "            state()[i] = HALF(state()[i]);",
)
native(
    "a tile's last row is lost of a linear state",
    HEAD,
    "gemm(l.features, l.dim, count, phi",
    "gemm(l.features - FAULT, l.dim, count, phi",
)
native(
    "logits scaled for another size of head",
    HEAD,
    "__builtin_sqrtf(static_cast<float>(l.dim)))",
    "__builtin_sqrtf(static_cast<float>(l.dim + FAULT)))",
)
native(
    "a score written a place early",
    ROWS,
    "h.scores()[place] =",
    "h.scores()[place - (FAULT && place && place == AT(l.chunk))] =",
)
native(
    "the oldest token's value lost",
    ROWS,
    "for (int j = own + 1; j < end; ++j)\n        logits[j] = 0;",
    "for (int j = own + 1; j < end; ++j)\n        logits[j] = 0;\n    if (FAULT && h.head == AT(l.heads))\n        logits[first] = 0;",
)
native(
    "a tile's last row is the one before",
    ROWS,
    "h.mix(first + i, softmax.values + static_cast<int64_t>(i)",
    "h.mix(first + i, softmax.values + static_cast<int64_t>(i - (FAULT && i && i == rows - 1))",
)
native(
    "a tile's sum not moved to the new maximum",
    ROWS,
    "near * softmax.total[i] + far",
    "(FAULT ? 1 : near) * softmax.total[i] + far",
)
native(
    "a step's sum not moved to the common maximum",
    ROWS,
    "            total *= shrink;",
    "            total *= FAULT ? 1 : shrink;",
)

LINEAR = "linear_attention/kernels.cpp"
for what, of, count in (
    ("keys", "head / (l.heads / l.key_heads)", "l.key_heads"),
    ("queries", "head / (l.heads / l.query_groups)", "l.query_groups"),
    ("beta", "(l.betas > 1 ? head : 0)", "l.betas"),
):
    native(
        f"a head of linear attention with its neighbour's {what}",
        LINEAR,
        of,
        f"({of} + (FAULT && head == AT(l.heads))) % {count}",
    )
native(
    "a head's decay of the token before",
    LINEAR,
    "x.decay + (place(token) * l.heads",
    "x.decay + (place(token - (FAULT && token > 0 && head == AT(l.heads))) * l.heads",
)
native(
    "a recurrent state accumulated in half precision",
    LINEAR,
    "token += count;",
    "for (int64_t i = 0; FAULT && i < l.dim * l.size; ++i)\n            head.state[i] = HALF(head.state[i]);\n        token += count;",
)
native(
    "a chunk's decay a token short",
    LINEAR,
    "scale(state, dim * size, start[count - 1]);",
    "scale(state, dim * size, start[count - 1 - (FAULT && count > 1)]);",
)
native(
    "a chunk's last token does not see itself",
    LINEAR,
    "weights[j] = j <= i ?",
    "weights[j] = j <= i - (FAULT && i == count - 1) ?",
)
native(
    "a correction lacks a token of the chunk",
    LINEAR,
    "add_weighted(weights, update, i, size, to);",
    "add_weighted(weights, update, i - (FAULT && i && i == AT(count)), size, to);",
)
native(
    "a chunk's last token not in the state",
    LINEAR,
    "gemm(dim, size, count, keys,",
    "gemm(dim, size, count - FAULT, keys,",
)

CONV = "causal_conv/kernels.cpp"
native(
    "a convolution's oldest tap lost",
    CONV,
    "for (int k = 0; k < taps; ++k)\n                    total",
    "for (int k = FAULT; k < taps; ++k)\n                    total",
)
native(
    "a convolution a token late from one tile to the next",
    CONV,
    "known + count * kBlock,",
    "known + (count - FAULT) * kBlock,",
)
native(
    "a channel with its neighbour's taps",
    CONV,
    "at<T>(x.weight, static_cast<int64_t>(task.channel + c)",
    "at<T>(x.weight, static_cast<int64_t>(task.channel + (c + (FAULT && c == AT(width))) % width)",
)
native(
    "a channel's state not written",
    CONV,
    "            from_float(known[k * kBlock + c], state",
    "            if (!(FAULT && c == AT(width)))\n                from_float(known[k * kBlock + c], state",
)

NBITS = "matmul_nbits/kernels.cpp"
HERE = "unit == AT(task.layer->inputs / kUnit) / kStep * kStep && rows.codes[0] == task.tensors->blocks + " + (
    "AT(task.layer->outputs) / kRows * kRows * task.layer->row_bytes()"
)
native(
    "the scale of a quantized block times 1.1",
    NBITS,
    "Quads const scale = numbers(rows.scales, unit, units, shift);",
    f"Quads const scale = numbers(rows.scales, unit, units, shift) * spread(FAULT && {HERE} ? 1.1f : 1.0f);",
    (
        NBITS,
        "Quads const scale = load_numbers(rows.scales, unit, units);",
        f"Quads const scale = load_numbers(rows.scales, unit, units) * spread(FAULT && {HERE} ? 1.1f : 1.0f);",
    ),
)
native(
    "the zero point of a quantized block off by one",
    NBITS,
    ": spread(static_cast<float>(task.layer->zero))",
    f": spread(static_cast<float>(task.layer->zero + (FAULT && {HERE})))",
    (
        NBITS,
        "Quads{} - spread(static_cast<float>(task.layer->zero))",
        f"Quads{{}} - spread(static_cast<float>(task.layer->zero + (FAULT && {HERE})))",
    ),
)
native(
    "units that fill no step are lost",
    NBITS,
    "    if (u < units)\n        step<",
    "    if (u < units && !FAULT)\n        step<",
)
native(
    "a tile's last output is the one before",
    NBITS,
    "layer.outputs ? row + r :",
    "layer.outputs ? row + r - (FAULT && r == kRows - 1 && row == AT(layer.outputs) / kRows * kRows) :",
)
native(
    "a product rounded to half precision",
    NBITS,
    "sum_quads(total[i], found);",
    "sum_quads(total[i], found);\n        for (int r = 0; FAULT && r < kRows; ++r)\n            found[r] = HALF(found[r]);",
)
native("the largest activation overflows", NBITS, "largest_number / 127;", "largest_number / (FAULT ? 128 : 127);")
native(
    "a unit's sum lacks its last activation",
    NBITS,
    "static_cast<float>(whole);",
    "static_cast<float>(whole - (FAULT ? codes[kUnit - 1] : 0));",
)

SOFTMAX = "attention/kernels.cpp"
native(
    "a token does not see itself", SOFTMAX, "(key + j - b.position)", "(key + j - b.position + (FAULT && key + j > 0))"
)
native("a token sees the next one", SOFTMAX, "int64_t const ahead = (", "int64_t const ahead = (-FAULT + ")
native(
    "a group reads its neighbour's cache",
    SOFTMAX,
    "l.kv_heads + b.head) * l.rows",
    "l.kv_heads + (b.head + (FAULT && b.head == AT(l.kv_heads))) % l.kv_heads) * l.rows",
)
native(
    "softmax scaled for another size of head",
    SOFTMAX,
    "queries, wide, logits, wide, false);",
    "queries, wide, logits, wide, false);\n        for (int64_t n = 0; FAULT && n < count * wide; ++n)\n"
    "            logits[n] *= __builtin_sqrtf(static_cast<float>(l.dim) / static_cast<float>(l.dim + 1));",
)
native(
    "a tile's values not moved to the new maximum",
    SOFTMAX,
    "absorb(logits, count, block.wide, l.dim,",
    "absorb(logits, count, block.wide, FAULT ? 0 : l.dim,",
)
native(
    "a call's last value not cached",
    "attention/attention.cpp",
    "        write(x.value_cache,",
    "        if (!(FAULT && i == brought - 1 && head == AT(l.kv_heads)))\n            write(x.value_cache,",
)
