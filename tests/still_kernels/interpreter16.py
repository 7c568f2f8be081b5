"""Triton's interpreter, made right for 16-bit floats as the kernels use them, and made to refuse what it would get wrong.

The interpreter keeps bfloat16 as the integers of its bits and computes with those: products, sums and comparisons are nonsense
without a word, and a conversion from float32 cuts bits off where hardware rounds. Here matrix products take the exact values and
accumulate in float32, as matrix instructions do; conversions round to nearest, ties to even; any other arithmetic on 16-bit
floats raises, float16 included: a kernel that did it would lose accuracy on hardware too. So does a product of float32, which is
rounded to tf32 on hardware, unless it asks for the three products that are not ("tf32x3").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

MOVES = (
    "masked_load masked_store load store reshape trans expand_dims broadcast cat join split splat unsplat gather select bitcast "
    "addptr fp_ext fp_trunc dot descriptor_store"
).split()
"""Builder methods that may see 16-bit floats: they move values, or are made right below."""


def _narrow(handle: Any) -> bool:
    return isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar.name in ("fp16", "bf16")


def widened(data: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 values of float16, or of bfloat16's or e4m3's bits."""
    if dtype == tl.float8e4nv:
        return torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn).float().numpy()
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def bfloat16_bits(data: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to bfloat16, nearest, ties to even."""
    bits = np.ascontiguousarray(data).view(np.uint32).reshape(data.shape)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FFF, rounded).astype(np.uint16)


def _extend(self: Any, source: Any, target: Any) -> Any:
    data = widened(source.data, source.dtype.scalar)
    assert target.scalar == tl.float32, f"{source.dtype} to {target}"
    return interpreter.TensorHandle(data, tl.float32)


def _truncate(self: Any, source: Any, target: Any) -> Any:
    assert source.dtype.scalar == tl.float32, f"{source.dtype} to {target}"
    if target.scalar == tl.bfloat16:
        return interpreter.TensorHandle(bfloat16_bits(source.data), tl.bfloat16)
    with np.errstate(over="ignore"):
        return interpreter.TensorHandle(source.data.astype(np.float16), tl.float16)


def _convert(self: Any, source: Any, target: Any, _rounding: Any) -> Any:
    """To e4m3: saturating, nearest, ties to even."""
    assert source.dtype.scalar == tl.float32 and target.scalar == tl.float8e4nv, f"{source.dtype} to {target}"
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, _imprecise: Any) -> Any:
    if a.dtype.scalar == b.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32x3:
        return interpreter.TensorHandle(np.matmul(a.data, b.data) + d.data, tl.float32)
    if not (_narrow(a) and _narrow(b)) and not a.dtype.scalar == b.dtype.scalar == tl.float8e4nv:
        raise TypeError(f"a product of {a.dtype} by {b.dtype} among 16-bit activations, rounded to tf32 on hardware")
    if d.dtype.scalar != tl.float32:
        raise TypeError(f"a product accumulates in {d.dtype}")
    product = np.matmul(widened(a.data, a.dtype.scalar), widened(b.data, b.dtype.scalar))
    return interpreter.TensorHandle(product + d.data, tl.float32)


class Results:
    """Of assembly: tensors of 16-bit floats, the interpreter's way."""

    def __init__(self, tensors: Any, kinds: list[Any]) -> None:
        self.tensors, self.kinds = tensors, [kind.scalar for kind in kinds]

    def get_result(self, i: int) -> Any:
        kind, found = self.kinds[i], self.tensors[i]
        data = found.view(torch.int16).numpy().view(np.uint16) if kind == tl.bfloat16 else found.numpy()
        return interpreter.TensorHandle(data, kind)


def _assembly(
    self: Any, text: str, constraints: str, values: list[Any], kinds: list[Any], _pure: bool, pack: int
) -> Results:
    from tests.still_kernels import ptx

    assert pack == 1, "one element of each operand at a time"
    half = torch.bfloat16 if kinds[0].scalar == tl.bfloat16 else torch.float16
    found = ptx.run(text, constraints, [torch.from_numpy(np.ascontiguousarray(x.data)) for x in values], half)
    return Results(found if isinstance(found, tuple) else (found,), kinds)


def refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any) -> Any:
        if any(_narrow(arg) for arg in args):
            raise TypeError(f"{name} of 16-bit floats: convert them to float32 first")
        return method(self, *args)

    return refuse


def install() -> None:
    """Patch the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    for name in dir(builder):
        plain = name.removeprefix("create_")
        if plain != name and plain not in MOVES:
            setattr(builder, name, refusing(plain, getattr(builder, name)))
    builder.create_fp_ext = _extend
    builder.create_fp_trunc = _truncate
    builder.create_fp_to_fp = _convert
    builder.create_dot = _dot
    builder.create_inline_asm = _assembly
    builder.get_bf16 = lambda self, value: interpreter.TensorHandle(
        bfloat16_bits(np.array([value], dtype=np.float32)), tl.bfloat16
    )
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        _refuse_reductions(operation)


def _refuse_reductions(operation: Any) -> None:
    check_tensor = operation.check_tensor

    def check(self: Any, inputs: Any) -> None:
        check_tensor(self, inputs)
        if any(_narrow(x.handle) for x in inputs):
            raise TypeError("a reduction of 16-bit floats: convert them to float32 first")

    operation.check_tensor = check
