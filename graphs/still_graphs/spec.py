"""What an op is, as data: names, order, shapes, dtypes, attributes, and how its states grow. Stdlib only.

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
"""Element type of a tensor: "T" is the activations' type (float16, bfloat16 or float32). Counts are "int64", which hosts may narrow;
"int32" is what it says."""

Role = Literal["activation", "weight", "count", "state"]
AttributeValue = int | float | str


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. Shapes are numbers, symbols, or multiples or parts of a symbol ("2*C", "D/4").

    A symbol with the name of an integer attribute has its value; an output of which that is 0 does not exist.
    `narrow`: an input of type "T" that may be float16 beside float32 activations.

    Symbols of all ops: B batch, T tokens, H query heads, HK key/value heads, D head dim, N rows of a state that grows; the others are
    explained by the op that has them.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: DType
    role: Role
    optional: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class Growth:
    """How many rows a state has along `axis` after t tokens: rows * max(0, ceil(t / per) - lag).

    Args:
        dimension: Name of the free dimension in exported graphs.
        axis: Of the state's shape; the dimension there is "N".
        rows, per: Numbers, or names of the op's attributes that hold them.
        lag: Blocks of `per` tokens that have no rows yet.
        only: Attribute and value with which the state grows; with another value it has, from the first token on, the rows that the
            capacity needs, and never more. None: it always grows.
        counted: A state of the op, [B, ..], that counts the `per` tokens whose rows are still held, the newest ones apart: the rule is then
            the most that there can be.
    """

    dimension: str
    axis: int
    rows: int | str = 1
    per: int | str = 1
    lag: int = 0
    only: tuple[str, AttributeValue] | None = None
    counted: str = ""

    def resolve(self, attributes: Mapping[str, AttributeValue]) -> dict[str, int | str | bool]:
        """The rule in numbers, as the manifest has it (`still_graphs.states` evaluates it)."""
        rows, per = (attributes[x] if isinstance(x, str) else x for x in (self.rows, self.per))
        fixed = self.only is not None and attributes[self.only[0]] != self.only[1]
        return {
            # A state without rows shares no dimension with others: a window's layer next to hybrid ones.
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
    """One state: `past_<name>` in, `present_<name>` out. All-zero means empty.

    Args:
        name, shape, dtype: See TensorSpec; the first dimension is the batch.
        growth: How it grows with the context; None: its size is fixed.
        only: Attribute and value with which the op has this state; None: always.
        in_place: Past and present may be one buffer when a runtime runs the function body; kernels always take one or two.
        narrow: Of type "T", but may be kept in float16 beside float32 activations (`--cache float16`), or where `CACHE` says so in
            8 bits. What enters it is rounded before the op, so that a call computes with the numbers that later calls read.
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
        """Whether the op has it only with 8-bit rows."""
        return self.only == (CACHE.name, "int8")

    def exists(self, attributes: Mapping[str, AttributeValue]) -> bool:
        return self.only is None or attributes[self.only[0]] == self.only[1]

    def sizes(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers; `symbols` holds those that the shape names ("2*C" needs C)."""
        return in_numbers(self.shape, symbols)

    def resolve(self, attributes: Mapping[str, AttributeValue]) -> StateSpec:
        """The state as stored with these attributes: 8-bit rows are words of four codes, the first one lowest."""
        if not (self.narrow and in_codes(attributes)):
            return self
        return replace(self, shape=(*self.shape[:-1], f"{self.shape[-1]}/{CODES}"), dtype="int32", narrow=False)


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute of a node; `choices` is empty if any value of the type is valid."""

    name: str
    default: AttributeValue
    choices: tuple[str, ...] = ()


CACHE = AttributeSpec("cache", "float", ("float", "int8"))
"""How an op keeps the states that are `narrow`: as numbers, or each row as one byte a number and a scale, `<state>_scale`.

With a the largest magnitude of a row: scale = a / 127, code = x / scale, both divided in float32, codes to the nearest integer, halves to
the even one; a row of zeros has the scale 0. A row that is read is code * scale in float32, then in the activations' type; sums of
codes alone, scaled behind, round nothing again. Rows that were read are written as they were, bit for bit.
"""
CODES = 4
"""Codes of a word: some runtimes do not allow byte tensors for custom ops."""


def in_codes(attributes: Mapping[str, AttributeValue]) -> bool:
    """Whether an op with these attributes stores rows in 8 bits."""
    return attributes.get(CACHE.name) == "int8"


def scales_of(state: StateSpec) -> StateSpec:
    """The scales of the rows of a state in 8 bits."""
    return StateSpec(f"{state.name}_scale", state.shape[:-1], "float32", state.growth, (CACHE.name, "int8"))


def dimension(text: str) -> tuple[int, str, int]:
    """(factor, symbol, divisor) of a dimension: "2*C", "D/4"."""
    rest, _, divisor = text.partition("/")
    factor, _, symbol = rest.rpartition("*")
    return int(factor or 1), symbol, int(divisor or 1)


def in_numbers(shape: tuple[str | int, ...], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """A shape in numbers; `symbols` holds those that it names ("2*C" needs C)."""

    def size(dim: str | int) -> int:
        if isinstance(dim, int):
            return dim
        factor, symbol, divisor = dimension(dim)
        return factor * symbols[symbol] // divisor

    return tuple(size(dim) for dim in shape)


@dataclass(frozen=True)
class OpSpec:
    """One op: `name` in ONNX and TensorRT, `torch_name` in torch, inputs and outputs in order.

    traced: Programs of PyTorch have it; else passes put it into graphs, or quantization does.
    home: The package of an op of another tree; an op of this one is the folder `torch_name` of still_kernels.
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
        """The package with the op's parts: spec, body, fuse, meaning, plan, kernels, call, ties."""
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
        """The attribute called `name`; KeyError for an unknown one (a bug of the caller)."""
        return {a.name: a for a in self.attributes}[name]

    def state(self, name: str) -> StateSpec:
        """The state called `name`; KeyError for an unknown one (a bug of the caller)."""
        return {s.name: s for s in self.states}[name]

    def resolve(self, attributes: Mapping[str, AttributeValue]) -> OpSpec:
        """The op with its states as stored with these attributes. Scales, the last states, are only in it with codes; other absent states
        stay."""
        own = (s for s in self.states if in_codes(attributes) or not s.of_codes)
        return replace(self, states=tuple(s.resolve(attributes) for s in own))

    def states_with(self, attributes: Mapping[str, AttributeValue]) -> tuple[StateSpec, ...]:
        """The states that the op has with these attributes, in order, as stored."""
        return tuple(s.resolve(attributes) for s in self.states if s.exists(attributes))
