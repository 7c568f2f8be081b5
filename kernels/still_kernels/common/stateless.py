"""A factory of ops without a state. Such an op is its Triton functions and one file with its plan, block sizes and definition in PyTorch.
Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar

from still_kernels.forms import has_kernels
from still_kernels.op_kernels import HALVES, Op, OpKernels, builder, check_known, imported
from still_kernels.plan import Check, Plan
from still_kernels.tile import TileTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from still_kernels.common.launches import Stateless


class StatelessInputs:
    """Inputs of a call: a frozen dataclass with the names of the op's tensors and attributes."""

    PLAN: ClassVar[Plan]

    def __init_subclass__(cls, plan: Plan) -> None:
        cls.PLAN = plan

    def check(self) -> None:
        """Raise ShapeError for a tensor that does not fit, or with the message of a failed check of the plan."""
        from still_kernels.sizes import check

        check(self.PLAN, self)


def defined(compute: Callable[[Any, torch.dtype], Any]) -> Callable[[Any], Any]:
    """The definition of an op. `compute` calculates results in a given type. Inputs are checked and widened to at least float32; results
    are rounded to the inputs' type."""

    @wraps(compute)
    def definition(inputs: Any) -> Any:
        import torch

        inputs.check()
        dtype = getattr(inputs, inputs.PLAN.spec.inputs[0].name).dtype
        results = compute(inputs, torch.promote_types(dtype, torch.float32))
        return results.to(dtype) if isinstance(results, torch.Tensor) else tuple(x.to(dtype) for x in results)

    return definition


def keyed(**own: str) -> dict[str, str]:
    """The `Plan.key` of an op: the type of activations and the variants' other fields; there are no counts."""
    return {"dtype": "dtype", **own, "count_dtype": "'int32'"}


@dataclass(frozen=True)
class StatelessVariant:
    """Properties that a set of kernels is compiled for; everything else is a run-time argument."""

    DTYPES: ClassVar[Sequence[str]] = HALVES
    dtype: str = "float16"
    count_dtype: str = field(default="int32", kw_only=True)

    def __post_init__(self) -> None:
        check_known(self, self.DTYPES)


@dataclass(frozen=True, kw_only=True)
class StatelessOp(Op):
    """An op whose results depend only on a call's inputs.

    Args:
        definition: In PyTorch, in at least float32; returns a tensor, or a tuple for several outputs.
        tiles: Block sizes of a variant on an architecture (90 for sm_90).
    """

    definition: Callable[[Any], Any]
    tiles: Callable[[Any, int], TileTable]

    @cached_property
    def _kernels(self) -> Stateless:
        from still_kernels.common.launches import Stateless

        return Stateless(self.kernels)

    def __call__(self, inputs: Any) -> Any:
        """Results from the fastest implementation that covers the call; results and errors: see the definition.

        Raises:
            UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
        """
        first: Tensor = getattr(inputs, self.kernels.spec.inputs[0].name)
        return self.run(inputs) if has_kernels(first.device) else self.definition(inputs)

    def run(self, inputs: Any) -> Any:
        """Results from the kernels."""
        results = self._kernels.run(inputs)
        return results if len(self.kernels.spec.outputs) > 1 else results[0]

    def launch(self, inputs: Any, *outputs: Tensor, table: TileTable | None = None) -> None:
        """Run the kernels into existing outputs; see `Stateless.launch`."""
        self._kernels.launch(inputs, *outputs, table=table)


def stateless_op(
    plan: Plan,
    variant: type[StatelessVariant],
    defaults: Sequence[StatelessVariant],
    tiles: Callable[[Any, int], TileTable],
    definition: Callable[[Any], Any],
    *,
    module: str,
    covers: str = "",
    also: Sequence[Check] = (),
    compiled: Callable[[Any], dict[str, Any]] | None = None,
    blocks: Mapping[str, str] | None = None,
    optional: Mapping[str, str] | None = None,
) -> StatelessOp:
    """The op of a plan.

    Args:
        defaults: Variants of an archive by default.
        definition, tiles: See `StatelessOp`.
        module: Module of the op's Triton functions, with `FUNCTIONS` by kernel.
        covers: Subject of a message if kernels have only some types: "gates have".
        also: Further requirements of the kernels on a call.
        compiled: Compile-time values of a variant besides those of tiles; by default ALIGNED and WHOLE.
        blocks: See `builder`.
        optional: Optional tensors of a call, each with the variant's field that shows its presence.
    """

    def flags(variant: Any) -> dict[str, Any]:
        return {name.upper(): getattr(variant, name) for name in ("aligned", "whole") if hasattr(variant, name)}

    types = Check(
        f"dtype in ({', '.join(map(repr, variant.DTYPES))},)",
        f"activations are {{dtype}}; {covers} kernels for {', '.join(variant.DTYPES)}.",
    )
    kernels = OpKernels(
        plan=plan,
        variant=variant,
        default_variants=lambda: list(defaults),
        build=builder(
            tiles,
            compiled or flags,
            blocks or {},
            lambda variant: (name for name, attribute in (optional or {}).items() if not getattr(variant, attribute)),
        ),
        functions=imported(module, "FUNCTIONS"),
        covered=(*([types] if covers else []), *also),
    )
    return StatelessOp(kernels, definition=definition, tiles=tiles)
