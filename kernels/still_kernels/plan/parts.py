"""Parts of a plan, and their values for one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from still_graphs.ops import OpSpec
from still_graphs.spec import dimension
from still_kernels.plan.expressions import Environment, symbols

ELEMENTS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4, "int64": 8}
"""Bytes of an element of a region."""
MAX_STEPS = 1 << 18
"""Steps of one call, loops unrolled."""
NESTING = 8
"""Depth of loops and branches."""


@dataclass(frozen=True)
class Check:
    """A condition on a call for all variants; `message` has expressions in braces and the remedy."""

    condition: str
    message: str


@dataclass(frozen=True)
class Region:
    """A workspace buffer, uninitialised, or a persistent one, zero between launches.

    Args:
        element: A key of `ELEMENTS`, "T" for the type of the activations, or a name of `Plan.types`.
        when: The region exists if this is true; two regions with one name must not both exist.
    """

    name: str
    element: str
    shape: tuple[str | int, ...]
    when: str = "1"


@dataclass(frozen=True)
class Alias:
    """A second name for `tensor` in kernels, if `when` is true."""

    name: str
    tensor: str
    when: str = "1"


@dataclass(frozen=True)
class Matrix:
    """A tensor as consecutive rows, passed as a descriptor of its name; kernels copy blocks of it."""

    tensor: str
    rows: str
    columns: str


@dataclass(frozen=True, init=False)
class Launch:
    """One launch on a grid (x, y, z), with integers of its own. A grid with a 0 launches nothing."""

    kernel: str
    grid: tuple[str, str, str]
    arguments: Mapping[str, str]

    def __init__(self, kernel: str, grid: tuple[str, str, str], **arguments: str) -> None:
        for name, value in (("kernel", kernel), ("grid", grid), ("arguments", arguments)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Let:
    """A name for the following steps of the same body."""

    name: str
    value: str


@dataclass(frozen=True)
class Loop:
    """`body` for name = start, start + step, ... below stop."""

    name: str
    start: str
    stop: str
    step: str
    body: Sequence[Step]


@dataclass(frozen=True)
class Branch:
    """The first body if the condition is true, else the second."""

    condition: str
    then: Sequence[Step]
    otherwise: Sequence[Step] = ()


Step = Launch | Let | Loop | Branch


@dataclass(frozen=True)
class PlanParts:
    """What `Plan` is written in.

    Args:
        spec: The op.
        steps: Launches, in order.
        key: Name of each property that kernels are compiled for, and its value for a call. Sees no constant.
        constants: Names of integers that a compiled variant brings: block sizes that grids or regions follow from.
        checks: Conditions on shapes and attributes, in order. They see no constant and no defined name.
        define: Names in order of definition.
        arguments: Integers and reals that kernels take by these names.
        types: Names of element types, each an expression that gives a key of `ELEMENTS`.
        workspace, persistent: Regions in order; persistent ones are int32.
        aliases: Further names of tensors.
        matrices: Rows and columns of tensors that kernels take by descriptor.
        measured_tokens: Values of T at which a call may need more workspace than at the largest T; every batch is measured at each.

    Raises:
        ConfigError: When used first: an expression is wrong, a name is taken, or steps are nested too deeply.
    """

    spec: OpSpec
    steps: Sequence[Step]
    key: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    checks: Sequence[Check] = ()
    define: Mapping[str, str | int] = field(default_factory=dict)
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    workspace: Sequence[Region] = ()
    persistent: Sequence[Region] = ()
    aliases: Sequence[Alias] = ()
    matrices: Sequence[Matrix] = ()
    measured_tokens: Sequence[str | int] = (1,)


@dataclass(frozen=True)
class Buffer:
    """A region of one call."""

    name: str
    element: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Launched:
    """A launch of one call; `arguments` are its own, besides the plan's."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: Mapping[str, int]


@dataclass(frozen=True)
class Launches:
    """A plan evaluated for one call: buffers to allocate and kernels to launch."""

    workspace: tuple[Buffer, ...] = ()
    persistent: tuple[Buffer, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, int | float] = field(default_factory=dict)
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    steps: tuple[Launched, ...] = ()


@dataclass(frozen=True)
class Call:
    """Facts about a call that a plan reads.

    Args:
        sizes: By symbol of the OpSpec, if known; B and T as above.
        attributes: All attributes of the op.
        constants: Constants of the variant.
        dtype, count_dtype: Types of activations and of counts, "float16", "int64"; None if unknown.
        present: Plain names of the optional tensors that the call has.
        shapes: Shapes of the tensors that the plan reads with dim().
        tokens, rows: Counts for packed sequences; None = padded.
    """

    sizes: Mapping[str, int]
    attributes: Mapping[str, Any]
    constants: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    count_dtype: str | None = None
    present: frozenset[str] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: int | None = None
    rows: int | None = None

    @classmethod
    def of(
        cls,
        spec: OpSpec,
        shapes: Mapping[str, tuple[int, ...]],
        attributes: Mapping[str, Any],
        dtype: str | None,
        count_dtype: str | None,
    ) -> Call:
        """The call of an op with these inputs.

        Args:
            shapes: Of the present inputs, by their names in the op (`past_<state>`); a dimension of 0 or less is unknown. The last two
                dimensions of an activation may be joined.
        """
        spec = spec.resolve(attributes)
        known = {
            name: tensor for name, tensor in zip(spec.input_names(), spec.all_inputs(), strict=True) if name in shapes
        }
        sizes = {name: attributes[name] for name in symbols(spec) if name in attributes}
        for weights in (False, True):  # 1 in a weight's shape is shared by all heads
            found = [
                (shapes[name], tensor.shape) for name, tensor in known.items() if (tensor.role == "weight") == weights
            ]
            for got, dims in found:
                for dim, size in zip(dims, got, strict=False) if len(got) == len(dims) else ():
                    if size > 0 and isinstance(dim, str):
                        factor, symbol, divisor = dimension(dim)
                        sizes.setdefault(symbol, size * divisor // factor)
            for got, dims in found:
                if len(got) == len(dims) - 1 and got[-1] > 0 and sizes.get(str(dims[-1])):
                    sizes.setdefault(str(dims[-2]), got[-1] // sizes[str(dims[-1])])
        plain = {
            tensor.name: shapes[name] for name, tensor in reversed(known.items())
        }  # an input has priority over a state with its name
        return cls(sizes, attributes, {}, dtype, count_dtype, frozenset(plain), plain)

    def environment(self) -> Environment:
        """Values of names in compiled expressions; names without a value are left out."""
        call = {"dtype": self.dtype, "count_dtype": self.count_dtype, "tokens": self.tokens, "rows": self.rows}
        if self.tokens is None and {"B", "T"} <= set(self.sizes):
            call |= {"tokens": self.sizes["B"] * self.sizes["T"], "rows": self.sizes["B"]}
        env: Environment = {"present": self.present, "shapes": self.shapes}
        env |= {f"call {name}": value for name, value in call.items() if value is not None}
        for kind, values in (("size", self.sizes), ("attribute", self.attributes), ("constant", self.constants)):
            env |= {f"{kind} {name}": value for name, value in values.items()}
        return env
