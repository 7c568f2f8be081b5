"""Check linear layers in e4m3 against PyTorch, and time them beside 16 bits and PyTorch's own, on a GPU of sm_89 or later.

  PYTHONPATH=.:kernels:graphs python -m tools.benchmarks.float8 [--tokens 1,8,64,512,8192] [--layers llama,qwen] [--tiles]

It needs PyTorch and Triton alone; each row is a line of JSON.

First every number of half precision is rounded, rows with numbers that are none and of zeros go through, and sizes, blocks, norms and
residuals of all kernels are held to products of the same codes in float64. Then each linear layer of Llama-3.1-8B and Qwen2.5-1.5B:
microseconds of a call, rounding of its tokens in it (`fp8`), of still::DenseMatMul in float16 (`fp16`), of torch.matmul in float16, and of
torch._scaled_mm with a scale for each token and output, of tokens that were rounded before (`scaled_mm`). Weights come from memory: a CUDA
graph walks through 200 MB of them. `predicted` was written before the first run. --tiles times block sizes of each kernel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from still_kernels.common.launches import outputs_of
from still_kernels.dense_matmul.plan import OP, Inputs, rounded_tokens, tile_table
from still_kernels.launcher import arch_of
from still_kernels.plan import Call
from still_kernels.sizes import tensors_of
from still_kernels.tile import Setting, TileTable, changed
from tools.benchmarks.common import Findings, replayed
from tools.kernels.settings import stages

LAYERS = {
    "llama": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "qwen": {"qkv": (2048, 1536), "o": (1536, 1536), "gate_up": (17920, 1536), "down": (1536, 8960)},
}
"""Outputs and inputs, of Llama-3.1-8B and Qwen2.5-1.5B."""
WALK_BYTES = 200 << 20
"""Of weights that a graph walks through: four times the L2 of an H100."""
BOUND, FAST_BOUND = 1e-3, 4e-3
"""Of outputs by Frobenius norm: rounding to float16 is 2e-4 of it; matrix instructions of sm_90 keep 14 bits of sums of products in e4m3,
which are added to float32 every 128 products for a few tokens, and not at all for more (2.9e-3 over 14,336 inputs)."""
FEW, MANY = 16, 256
"""Tokens up to which bytes of the weight are what takes time, and from which products are."""
TILES: dict[str, list[Setting]] = {
    "few8": [
        {"BN": outputs, "num_warps": warps, **stages(count)[0]}
        for outputs, warps, count in ((64, 4, 4), (64, 4, 6), (64, 4, 10), (128, 4, 6), (128, 8, 6))
    ],
    "some8": [
        {"BM": 64, "BN": outputs, "num_warps": 4, **stages(count)[0]}
        for outputs, count in ((32, 6), (32, 8), (64, 4), (64, 8), (128, 4), (128, 6), (256, 4))
    ],
    "many8": [
        {"BM": rows, "BN": outputs, "STORE": 128, "num_warps": warps, **stages(count)[0]}
        for rows, outputs, warps, count in (
            (64, 128, 4, 4),
            (64, 256, 8, 3),
            (128, 128, 8, 3),
            (128, 128, 8, 5),
            (128, 256, 8, 4),
            (256, 128, 8, 3),
        )
    ],
    "round8": [
        {"BC": size, "num_warps": warps} for size, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (8192, 16))
    ],
}


Weight = dict[str, Any]
"""Tensors of a weight by the op's names."""


add = Findings().add


def float8(weight: Tensor, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """A weight [O, I] as words of codes [O, I / 4], and scales [blocks, O]."""
    parts = weight.float().unflatten(1, (blocks, -1))
    scales = parts.abs().amax(-1) / 448
    return (parts / scales[..., None]).to(torch.float8_e4m3fn).flatten(1).view(torch.int32), scales.T.contiguous()


def error_of(given: Inputs) -> float:
    """Of the kernels beside the definition in float64, which takes the same codes, by Frobenius norm."""
    found, expected = OP.run(given).double(), OP.definition.__wrapped__(given, torch.float64)  # type: ignore[attr-defined]
    return float((found - expected).norm() / expected.norm())


def check_numbers() -> None:
    """Every number of half precision up to 448, in tokens whose scale is 1, times the identity: what torch rounds it to, to the last bit;
    a token of zeros, one with a number that is none and one with an infinite one."""
    held = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)
    held = held[held.abs() <= 448]
    tokens = torch.nn.functional.pad(held, (0, -len(held) % 255)).reshape(1, -1, 255)
    tokens = torch.cat([torch.full_like(tokens[..., :1], -448), tokens], -1)
    tokens[0, 0], tokens[0, 1, 7], tokens[0, 2, 9] = 0, torch.nan, torch.inf
    expected = tokens.to(torch.float8_e4m3fn).half()
    expected[0, 1:3] = torch.nan
    codes = torch.eye(256).to(torch.float8_e4m3fn).view(torch.int32)
    for begin, end in ((0, 16), (0, 200), (0, tokens.shape[1])):
        given = Inputs(tokens[:, begin:end].cuda(), codes=codes.cuda(), scales=torch.ones(1, 256).cuda())
        found, wanted = OP.run(given).cpu(), expected[:, begin:end]
        same = (found == wanted) | (found.isnan() & wanted.isnan())
        if not bool(same.all()):
            wrong = tokens[:, begin:end][~same]
            raise SystemExit(f"{len(wrong)} numbers are rounded otherwise than by torch, such as {wrong[:5].tolist()}.")


def check_sizes() -> None:
    """All kernels, sizes that are no multiples of blocks, scales of blocks, norms, residuals; both types of tokens."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    half, worst = torch.float16, 0.0
    sizes = [
        (72, 208, 1),
        (37, 80, 1),
        (1536, 1536, 12),
        (4096, 14336, 112),
        (9000, 1024, 1),
        (9216, 1024, 8),
        (9001, 208, 1),
    ]
    for dtype, outputs, inputs, blocks in [*((half, *size) for size in sizes), (torch.bfloat16, 2048, 1536, 1)]:
        codes, scales = float8(drawn(outputs, inputs) / inputs**0.5, blocks)
        for tokens in (1, 16, 17, 64, 300):
            x, residual = drawn(1, tokens, inputs).to(dtype), drawn(1, tokens, outputs).to(dtype)
            for more in ({}, {"residual": residual, "norm_weight": drawn(inputs).to(dtype)}):
                error = error_of(Inputs(x, codes=codes, scales=scales, **more))  # type: ignore[arg-type]
                bound = BOUND if dtype == half else 4e-3
                if more:  # norms that differ from float64's in the last bit turn a code here and there
                    bound *= 4
                if not error <= bound:
                    raise SystemExit(
                        f"{tokens} x {outputs} x {inputs}, {blocks} blocks, {dtype}, {list(more)}: off by {error}."
                    )
                worst = max(worst, error if dtype == half and not more else 0.0)
    add(checked="numbers and sizes", bound=BOUND, worst=worst)


def predicted(tokens: int, outputs: int, inputs: int) -> float:
    """Microseconds of a call on an H100 (3.35 TB/s), as thought before any run: a launch that rounds, then bytes of codes at 0.7 of the
    copy rate, or products at 350 to 850 TFLOP/s."""
    rounding = 2.5 + 3e6 * tokens * inputs / 2e12
    reading = 1.5 + 1e6 * outputs * inputs / 2.3e12
    if tokens <= FEW:
        return rounding + reading
    rate = 350e12 if tokens <= MANY else 600e12 if tokens <= 2048 else 850e12
    return rounding + max(reading, 2e6 * tokens * outputs * inputs / rate + 3)


def microseconds(calls: list[Callable[[], Any]], runs: int = 7) -> float:
    """Of one of `calls`, which a CUDA graph makes one after the other; median."""

    def walk() -> None:
        for call in calls:
            call()

    replay = replayed(walk)
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times[1:])


def calls_of(x: Tensor, weights: list[Weight], table: TileTable | None = None) -> list[Callable[[], Any]]:
    """Of the op with each of the weights."""
    made = [Inputs(x, **weight) for weight in weights]
    output = outputs_of(OP.kernels.spec, made[0])[0]
    return [partial(OP.launch, given, output, table=table) for given in made]


def scaled_mm(x: Tensor, weight: Weight) -> Callable[[], Any]:
    """torch._scaled_mm of tokens that are rounded; with scales of rows it gives bfloat16 alone."""
    codes, scales = rounded_tokens(x[0])
    right = weight["codes"].view(torch.float8_e4m3fn).T
    return partial(
        torch._scaled_mm, codes, right, scales, weight["scales"], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def settings(given: Inputs) -> Iterator[tuple[str, Setting, TileTable]]:
    """Other block sizes of the kernels that a call launches."""
    shapes = {name: tuple(x.shape) for name, x in tensors_of(given).items()}
    call = Call.of(OP.kernels.spec, shapes, {"norm_epsilon": 1e-5}, "float16", None)
    table = tile_table(OP.kernels.variant_of(call), arch_of(given.input.device))
    rows = given.input.shape[1]
    used = ["few8"] if rows <= FEW else ["some8"] if rows <= MANY else ["some8", "many8"] if rows <= 2048 else ["many8"]
    for kernel in [*used, "round8"]:
        for setting in TILES[kernel]:
            yield kernel, setting, changed(table, kernel, setting)


def time_layer(name: str, outputs: int, inputs: int, tokens: int, tiles: bool) -> None:
    """Rows of one linear layer and so many tokens."""
    # Where products take the time two weights are as good as many.
    count = 2 if tokens > MANY else max(2, min(64, WALK_BYTES // (outputs * inputs)))
    drawn = [torch.randn(inputs, outputs, device="cuda") / inputs**0.5 for _ in range(-(-count // 2))]
    floats: list[Weight] = [{"weight": weight.half()} for weight in drawn]
    codes: list[Weight] = [
        dict(zip(("codes", "scales"), float8(w.T.contiguous()), strict=True)) for w in drawn for _ in range(2)
    ]
    blocked = [{**w, "scales": w["scales"].expand(inputs // 128, -1).contiguous()} for w in codes]
    x = torch.randn(1, tokens, inputs, device="cuda").half()
    error = error_of(Inputs(x, **codes[0])) if tokens <= 512 else None
    row: dict[str, Any] = {"layer": name, "tokens": tokens, "error": error}
    row["predicted"] = round(predicted(tokens, outputs, inputs), 1)
    calls = {
        "fp8": calls_of(x, codes),
        "blocks of 128": calls_of(x, blocked),
        "fp16": calls_of(x, floats),
        "torch fp16": [partial(torch.matmul, x[0], w["weight"]) for w in floats],
        "scaled_mm": [scaled_mm(x, w) for w in codes],
    }
    for what, each in calls.items():
        try:
            row[what] = round(microseconds(each), 2)
        except RuntimeError as why:  # of a peer that does not take these sizes
            if what != "scaled_mm":
                raise
            row[what] = str(why).splitlines()[0]
    add(
        **row,
        tflops=round(2e-6 * tokens * outputs * inputs / row["fp8"]),
        of_copy=round(outputs * inputs / row["fp8"] / 3.35e6, 2),
    )
    bound = BOUND if tokens <= FEW else FAST_BOUND
    if error is not None and not error <= bound:
        raise SystemExit(f"{name}, {tokens} tokens: off by {error}, more than {bound}.")
    for kernel, setting, table in settings(Inputs(x, **codes[0])) if tiles else ():
        what = f"{kernel} {' '.join(f'{k}={v}' for k, v in setting.items() if k != 'num_stages')}"
        try:
            add(layer=name, tokens=tokens, tile=what, us=round(microseconds(calls_of(x, codes[:8], table)), 2))
        except Exception as why:  # what does not fit into shared memory or registers
            add(layer=name, tokens=tokens, tile=what, refused=type(why).__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,64,512,8192")
    parser.add_argument("--layers", default="llama,qwen")
    parser.add_argument("--tiles", action="store_true", help="block sizes of Llama's layers, too")
    asked = parser.parse_args()
    torch.manual_seed(0)
    add(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    check_numbers()
    check_sizes()
    for model in asked.layers.split(","):
        for layer, (outputs, inputs) in LAYERS[model].items():
            for tokens in map(int, asked.tokens.split(",")):
                time_layer(f"{model} {layer}", outputs, inputs, tokens, asked.tiles and model == "llama")


if __name__ == "__main__":
    main()
