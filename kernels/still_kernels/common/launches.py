"""Runs the plan of an op without a state with Triton."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_graphs.spec import OpSpec, in_numbers
from still_kernels import launcher
from still_kernels.op_kernels import OpKernels
from still_kernels.plan import Call
from still_kernels.sizes import sizes_of, tensors_of
from still_kernels.tile import TileTable

_Kind = tuple[torch.dtype, tuple[tuple[str, torch.Size], ...], tuple[Any, ...]]
"""Key of a call's launches: type of the activations, input shapes by name, attributes in the spec's order."""


class Stateless:
    """Launches of one op.

    Args:
        kernels: The op's kernels; `build` also accepts a table of block sizes, None for the architecture's own.
    """

    def __init__(self, kernels: OpKernels) -> None:
        self.kernels, self.spec = kernels, kernels.spec
        self._prepared = lru_cache(1024)(self._prepare)  # a layer is called once per token

    def launch(self, inputs: Any, *outputs: Tensor, table: TileTable | None = None) -> None:
        """Run the kernels.

        Args:
            inputs: The op's `Inputs`, contiguous.
            outputs: Tensors for the outputs of the call, in the spec's order, with the right shapes and types.
            table: Block sizes; None: the device's. With a table, Triton searches its compiled kernels at each launch.
        """
        tensors, first = tensors_of(inputs), getattr(inputs, self.spec.inputs[0].name)
        shapes = tuple((name, x.shape) for name, x in tensors.items())
        kind = (first.dtype, shapes, tuple(getattr(inputs, a.name) for a in self.spec.attributes))
        arch = launcher.arch_of(first.device)
        prepared = self._prepared(kind, arch) if table is None else self._prepare(kind, arch, table)
        if any(step.descriptors for step in prepared.launches):  # which want addresses that are multiples of 16
            tensors = {name: x.clone() if x.data_ptr() % 16 else x for name, x in tensors.items()}
        made = dict(zip((t.name for t in self.spec.outputs), outputs, strict=False))  # what a call may lack is last
        launcher.Launcher().run(prepared, {**tensors, **made}, first)

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """Outputs for any inputs on CUDA. Inputs are checked and made contiguous. Errors: see `check` and `launch`."""
        inputs.check()
        first = getattr(inputs, self.spec.inputs[0].name)
        if first.device.type != "cuda":
            raise UnsupportedError(f"device {first.device.type!r} has no kernel; known: cuda.")
        outputs = outputs_of(self.spec, inputs)
        self.launch(replace(inputs, **{name: x.contiguous() for name, x in tensors_of(inputs).items()}), *outputs)
        return outputs

    def _prepare(self, kind: _Kind, arch: int, table: TileTable | None = None) -> launcher.Prepared:
        dtype, shapes, values = kind
        attributes = {a.name: value for a, value in zip(self.spec.attributes, values, strict=True)}
        call = Call.of(self.spec, dict(shapes), attributes, str(dtype).removeprefix("torch."), None)
        return launcher.prepare_call(self.kernels, call, arch, table)


def outputs_of(spec: OpSpec, inputs: Any) -> tuple[Tensor, ...]:
    """New tensors for the outputs of a call, on the device of its first input."""
    sizes = {a.name: getattr(inputs, a.name) for a in spec.attributes}
    sizes |= sizes_of(spec, {name: x.shape for name, x in tensors_of(inputs).items()})
    first: Tensor = getattr(inputs, spec.inputs[0].name)
    shapes = [(in_numbers(tensor.shape, sizes), tensor.dtype) for tensor in spec.outputs]
    return tuple(
        first.new_empty(shape, dtype=None if kind == "T" else getattr(torch, kind))
        for shape, kind in shapes
        if shape[-1]
    )
