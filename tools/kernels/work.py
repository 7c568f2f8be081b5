"""What bench and tune ask of an op: its layers, kinds of calls with their least cost, and settings of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from still_kernels.tile import Setting, TileTable


@dataclass(frozen=True)
class Kind:
    """One kind of call: `batch` sequences bring `tokens` each after `length`."""

    name: str
    batch: int
    tokens: int
    length: int


class State(Protocol):
    """The state of a layer."""

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""


@dataclass(frozen=True)
class OneTensor:
    """The state of a layer whose op has one."""

    state: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """It, by name."""
        return vars(self)


@dataclass(frozen=True)
class Held:
    """What takes the place of a state in an op without one: of its `inputs` those that a step must not find in the cache, by `names`.

    beside: What other libraries have in the place of the inputs.
    """

    inputs: Any
    names: tuple[str, ...] = ()
    beside: Any = None

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: x for name in self.names if (x := getattr(self.inputs, name)) is not None}


@dataclass(frozen=True)
class Work:
    """Calls of one kind, on inputs of their own.

    size_bytes, flop: The least that a call moves and computes.
    state: A state as the calls find it, new every time, the same every time.
    reference: Output by PyTorch; leaves the state as it is.
    run: Output by the kernels, which write the state in place, as the model calls them.
    launch: The same with given block sizes, into an output [B, T, H, D].
    output: A tensor like the output.
    peers: Output by kernels of other libraries, by their name; `bench` checks and times them beside ours.
    """

    size_bytes: float
    flop: float
    state: Callable[[], Any]
    reference: Callable[[Any], Tensor]
    run: Callable[[Any], Tensor]
    launch: Callable[[Any, Tensor, TileTable], None]
    output: Tensor
    peers: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)


def kinds(context: int, batches: Sequence[int]) -> list[Kind]:
    """A prefill of one sequence, and steps of several."""
    return [Kind("prefill", 1, context, 0), *(Kind("decode", batch, 1, context - 1) for batch in batches)]


@dataclass(frozen=True)
class OpWork:
    """The op's part of bench and tune.

    sizes: Of a layer by name, with their defaults: those of Llama-3.1-8B.
    layers: Kinds of layers by name; the first is what tune takes.
    layer: From sizes, a kind and tokens that the layer has room for, to what the functions below call layer.
    kinds: Calls to be measured, from context and sequences of a step; prefill first, then steps of one token, or a step alone.
    work: From layer, kind, dtype and device.
    table: Block sizes, from layer, device and "float32 activations".
    moves: What tune tries, by kernel, or by a name of its own for settings of a whole call.
    decode: Those of `moves` that belong to a step.
    instead: The kernel that a table may have run in the place of another, by that other, whose settings choose between them.
    shares: Of tune's time, 1 where nothing is said.
    misfit: Why the block sizes of a table do not go together on an architecture (90 for sm_90), or nothing.
    dtypes: Activations that bench may draw, its choice first.
    """

    sizes: Mapping[str, int]
    layers: Mapping[str, Any]
    layer: Callable[[Mapping[str, int], str, int], Any]
    work: Callable[[Any, Kind, torch.dtype, str], Work]
    table: Callable[[Any, torch.device, bool], TileTable]
    moves: Mapping[str, list[Setting]]
    decode: frozenset[str]
    misfit: Callable[[TileTable, Any, int], str] = lambda table, layer, arch: ""
    kinds: Callable[[int, Sequence[int]], list[Kind]] = kinds
    instead: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def kind_of(self, kernel: str, context: int) -> Kind:
        """The call in which a kernel is timed."""
        first, *steps = self.kinds(context, (1,))
        return steps[0] if steps and kernel in self.decode else first


STEP_BYTES = 256 << 20
"""State that the steps of one CUDA graph walk through at least: several times the L2 cache."""


def states_of_step(work: Work) -> int:
    """So many states that a step does not find its own in the cache, 2 ... 32."""
    return max(2, min(32, -(-STEP_BYTES // int(work.size_bytes))))


CHECK_LIMIT = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Greatest relative error (Frobenius norm) of an output for which a speed is printed."""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; infinite where `got` has a NaN."""
    value = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    return value if value == value else float("inf")


def filled(state: Any, generator: torch.Generator) -> Any:
    """The state with random contents, all positive, as sums of features are; its length stays."""
    for name, tensor in state.tensors().items():
        if name != "length":
            tensor.copy_(torch.randn(tensor.shape, device=tensor.device, generator=generator).abs() + 0.1)
    return state
