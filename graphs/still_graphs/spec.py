"""Specification of an op as data: names, order, shapes, dtypes, attributes, growth of states. Stdlib only.

The torch op, its fake kernel, the ONNX node and function, the plugin's fields, every runner's buffers and the manifest's state table
are generated from these specs or checked against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

DOMAIN = "still"
VERSION = 1

DType = Literal["T", "float32", "int64", "int32"]
"""Element type of a tensor. "T" is the activations' type (float16, bfloat16 or float32). Counts are "int64", which hosts may narrow;
"int32" is always int32."""

Role = Literal["activation", "weight", "count", "state"]
AttributeValue = int | float | str


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. Dimensions are numbers, symbols, or multiples or fractions of a symbol ("2*C", "D/4").

    A symbol with the name of an integer attribute has its value; an output whose attribute is 0 does not exist.
    `narrow`: an input of type "T" that may be float16 with float32 activations.

    Symbols of all ops: B batch, T tokens, H query heads, HK key/value heads, D head dim, N rows of a growing state. Each op explains its
    other symbols.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: DType
    role: Role
    optional: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class Growth:
    """Number of rows of a state along `axis` after t tokens: rows * max(0, ceil(t / per) - lag).

    Args:
        dimension: Name of the free dimension in exported graphs.
        axis: Axis of the state's shape; its dimension is "N".
        rows, per: Numbers, or names of the op's attributes with them.
        lag: Number of last blocks of `per` tokens that have no rows yet.
        only: Attribute and value with which the state grows; with other values it always has the rows of the full capacity. None: it always
            grows.
        counted: A state of the op, [B, ..], with the actual number of blocks that have rows, without the newest; the rule is then an upper
            bound.
    """

    dimension: str
    axis: int
    rows: int | str = 1
    per: int | str = 1
    lag: int = 0
    only: tuple[str, AttributeValue] | None = None
    counted: str = ""

    def resolve(self, attributes: Mapping[str, AttributeValue]) -> dict[str, int | str | bool]:
        """The rule in numbers, as in the manifest (`still_graphs.states` evaluates it)."""
        rows, per = (attributes[x] if isinstance(x, str) else x for x in (self.rows, self.per))
        fixed = self.only is not None and attributes[self.only[0]] != self.only[1]
        return {
            # A state that never has rows shares no dimension with growing ones: a window layer next to hybrid ones.
            "dimension": self.dimension if int(rows) else f"no_{self.dimension}_{per}",
            "axis": self.axis,
            "rows": int(rows),
            "per": int(per),
            "lag": self.lag,
            "fixed": fixed,
            **({"counted": self.counted} if self.counted else {}),
        }


@dataclass(frozen=True)
class StateSpec:
    """One state: input `past_<name>`, output `present_<name>`. All zeros mean empty.

    Args:
        name, shape, dtype: See TensorSpec; the first dimension is the batch.
        growth: How it grows with the context; None: its size is fixed.
        only: Attribute and value with which the op has this state; None: always.
        in_place: Past and present may share a buffer when a runtime runs the function body. Kernels always accept one buffer or two.
        narrow: A state of type "T" that may be float16 with float32 activations (`--cache float16`), or 8-bit by `CACHE`. New rows are
            rounded before the op, so a call computes with the same numbers as later calls.
        features: This state sums feature vectors of one sign. GPU kernels hold features in bfloat16, because float16 could overflow.
            Rounding errors then add up instead of cancelling.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: DType
    growth: Growth | None = None
    only: tuple[str, AttributeValue] | None = None
    in_place: bool = True
    narrow: bool = False
    features: bool = False

    @property
    def role(self) -> Role:
        return "state"

    @property
    def optional(self) -> bool:
        """Whether some configurations of the op lack it."""
        return self.only is not None

    @property
    def of_codes(self) -> bool:
        """Whether the op has it only for 8-bit rows."""
        return self.only == (CACHE.name, "int8")

    def exists(self, attributes: Mapping[str, AttributeValue]) -> bool:
        return self.only is None or attributes[self.only[0]] == self.only[1]

    def sizes(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers. `symbols` has the values of the shape's symbols ("2*C" needs C)."""
        return in_numbers(self.shape, symbols)

    def resolve(self, attributes: Mapping[str, AttributeValue]) -> StateSpec:
        """The state as stored with these attributes: 8-bit rows are words of four codes, the first in the lowest byte."""
        if not (self.narrow and in_codes(attributes)):
            return self
        return replace(self, shape=(*self.shape[:-1], f"{self.shape[-1]}/{CODES}"), dtype="int32", narrow=False)


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute of a node; empty `choices` allow any value of the type."""

    name: str
    default: AttributeValue
    choices: tuple[str, ...] = ()


CACHE = AttributeSpec("cache", "float", ("float", "int8"))
"""How an op stores its `narrow` states: as numbers, or each row as one byte for each number and a scale, `<state>_scale`.

With a the largest magnitude of a row: scale = a / 127, code = x / scale, both divided in float32, codes rounded to the nearest integer and
halves to even. A row of zeros has the scale 0. A row is read as code * scale in float32, then in the activations' type. Sums of codes that
are scaled later need no second rounding. Rows that were read are written back bit for bit.
"""
CODES = 4
"""Codes in a word. Some runtimes do not allow byte tensors in custom ops."""


def in_codes(attributes: Mapping[str, AttributeValue]) -> bool:
    """Whether an op with these attributes stores rows in 8 bits."""
    return attributes.get(CACHE.name) == "int8"


def scales_of(state: StateSpec) -> StateSpec:
    """Scales of the rows of an 8-bit state."""
    return StateSpec(f"{state.name}_scale", state.shape[:-1], "float32", state.growth, (CACHE.name, "int8"))


def dimension(text: str) -> tuple[int, str, int]:
    """(factor, symbol, divisor) of a dimension: "2*C", "D/4"."""
    rest, _, divisor = text.partition("/")
    factor, _, symbol = rest.rpartition("*")
    return int(factor or 1), symbol, int(divisor or 1)


def in_numbers(shape: tuple[str | int, ...], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """A shape in numbers. `symbols` has the values of its symbols ("2*C" needs C)."""

    def size(dim: str | int) -> int:
        if isinstance(dim, int):
            return dim
        factor, symbol, divisor = dimension(dim)
        return factor * symbols[symbol] // divisor

    return tuple(size(dim) for dim in shape)


@dataclass(frozen=True)
class OpSpec:
    """One op: `name` in ONNX and TensorRT, `torch_name` in torch, inputs and outputs in order.

    Args:
        traced: PyTorch programs have it; other ops come from passes or quantization.
        home: Package of an op from another project; None: the folder `torch_name` of still_kernels.
    """

    name: str
    torch_name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[StateSpec, ...] = ()
    attributes: tuple[AttributeSpec, ...] = ()
    domain: str = DOMAIN
    version: int = VERSION
    traced: bool = True
    home: str = ""

    @property
    def package(self) -> str:
        """The package with the op's modules: spec, body, fuse, meaning, plan, kernels, call, ties."""
        return self.home or f"still_kernels.{self.torch_name}"

    def input_names(self) -> tuple[str, ...]:
        """Names of all inputs in order: activations, weights and counts, then `past_<state>`."""
        return tuple(t.name for t in self.inputs) + tuple(f"past_{s.name}" for s in self.states)

    def output_names(self) -> tuple[str, ...]:
        """Names of all outputs in order: activations, then `present_<state>`."""
        return tuple(t.name for t in self.outputs) + tuple(f"present_{s.name}" for s in self.states)

    def all_inputs(self) -> tuple[TensorSpec | StateSpec, ...]:
        """Inputs, then states, in the order of `input_names`."""
        return *self.inputs, *self.states

    def all_outputs(self) -> tuple[TensorSpec | StateSpec, ...]:
        """Outputs, then states, in the order of `output_names`."""
        return *self.outputs, *self.states

    def attribute(self, name: str) -> AttributeSpec:
        """The attribute `name`; KeyError if unknown (a bug of the caller)."""
        return {a.name: a for a in self.attributes}[name]

    def state(self, name: str) -> StateSpec:
        """The state `name`; KeyError if unknown (a bug of the caller)."""
        return {s.name: s for s in self.states}[name]

    def resolve(self, attributes: Mapping[str, AttributeValue]) -> OpSpec:
        """The op with its states as stored with these attributes. Scales are there only with 8-bit codes; other optional states are always
        there."""
        own = (s for s in self.states if in_codes(attributes) or not s.of_codes)
        return replace(self, states=tuple(s.resolve(attributes) for s in own))

    def states_with(self, attributes: Mapping[str, AttributeValue]) -> tuple[StateSpec, ...]:
        """The states that the op has with these attributes, in order, as stored."""
        return tuple(s.resolve(attributes) for s in self.states if s.exists(attributes))
