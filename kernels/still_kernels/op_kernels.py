"""The generic interface of an op (for aot, dispatch, packages): one `Op`, made in the op's folder, with its `OpKernels`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from still_graphs.errors import ConfigError, UnsupportedError, unknown
from still_graphs.spec import OpSpec
from still_kernels.plan import Call, Check, Plan
from still_kernels.tile import KernelTile, TileTable, pow2

DTYPES = ("float16", "bfloat16", "float32")
HALVES = DTYPES[:2]
"""Activation types of most ops without a state."""
COUNT_DTYPES = ("int32", "int64")
"""Types of counts, that every op's kernels support."""
MAX_HEAD_DIM = 256
TYPES = Check(f"dtype in {DTYPES}", f"dtype={{dtype}}; the kernels have {', '.join(DTYPES)}.")
HEAD_DIM = Check(f"D <= {MAX_HEAD_DIM}", f"head_dim={{D}}; the kernels have at most {MAX_HEAD_DIM}.")


def check_known(variant: Any, dtype: Sequence[str] = DTYPES, **more: Sequence[str]) -> None:
    """Raise ConfigError for a variant's type, or other field, without kernels."""
    for name, known in {"dtype": dtype, "count_dtype": COUNT_DTYPES, **more}.items():
        if getattr(variant, name) not in known:
            raise unknown(getattr(variant, name), known, f"{name}={getattr(variant, name)!r}")


def combinations(variant: Callable[..., Any], **fields: Sequence[Any]) -> Callable[[], list[Any]]:
    """A function that returns the variants of both 16-bit types, both count types, and all combinations of `fields`."""
    every = {"dtype": ("bfloat16", "float16"), **fields, "count_dtype": ("int64", "int32")}
    return lambda: [variant(**dict(zip(every, values, strict=True))) for values in itertools.product(*every.values())]


@dataclass(frozen=True)
class Build:
    """One variant on one architecture.

    Args:
        tiles: How each kernel is compiled.
        constants: Compile-time values by name, for all kernels; each takes those that it declares, its tile's first.
        plan_constants: Values of `Plan.constants`.
        absent: Pointers that calls of this variant do not have, which leave no code.
    """

    tiles: Mapping[str, KernelTile]
    constants: Mapping[str, Any]
    plan_constants: Mapping[str, int]
    absent: frozenset[str] = frozenset()


def builder(
    tiles: Callable[[Any, int], TileTable],
    constants: Callable[[Any], dict[str, Any]],
    blocks: Mapping[str, str],
    absent: Callable[[Any], Iterable[str]] = lambda variant: (),
) -> Callable[..., Build]:
    """A function build(variant, arch, table) that returns the `Build` of a variant on an architecture, optionally with other block sizes.

    Args:
        tiles: Block sizes of a variant on an architecture (90 for sm_90).
        constants, absent: Of a variant; see `Build`.
        blocks: The plan's constants that are constants of a kernel, "kernel.NAME" each; 0 where tables do not have the kernel.
    """

    def build(variant: Any, arch: int, table: TileTable | None = None) -> Build:
        table = tiles(variant, arch) if table is None else table
        found = {kernel.removesuffix("_tma"): tile.constants for kernel, tile in table.tiles.items()}
        sizes = {}
        for name, place in blocks.items():
            kernel, _, constant = place.partition(".")
            sizes[name] = found[kernel][constant] if kernel in found else 0
        return Build(table.kernels(), constants(variant), {**sizes, **table.host}, frozenset(absent(variant)))

    return build


def constants_of_heads(variant: Any) -> dict[str, Any]:
    """Compile-time constants of kernels over heads; each kernel uses those that it declares."""
    return {
        "D": variant.head_dim,
        "DP": pow2(variant.head_dim),
        "DOT": "tf32x3" if variant.dtype == "float32" else "tf32",
        **settling(),
    }


def settling() -> dict[str, int]:
    """The constant of kernels with assembly, which interpreters do not run."""
    import triton

    return {"SETTLE": int(not triton.knobs.runtime.interpret)}


@dataclass(frozen=True)
class OpKernels:
    """The kernels of one op.

    Args:
        plan: The op, and what a call of it launches.
        variant: Frozen dataclass of what a set of kernels is compiled for: its fields are the names of `plan.key`, among them `dtype`
            and `count_dtype`, with defaults; raises ConfigError for a value that is unknown.
        default_variants: What an archive has where nobody chooses.
        build: Of a variant and an architecture (90 for sm_90); ConfigError where there is none.
        functions: Triton's functions by kernel; imports Triton. Pointers are the first arguments and named p_*, descriptors of matrices
            of the plan d_*; integers at run time are left unspecialised.
        covered: What the kernels need of a call, as far as shapes, attributes and dtype tell; messages say what they have.
        covered_ahead: The same for kernels that are compiled ahead of time, by default what all need.
    """

    plan: Plan
    variant: type[Any]
    default_variants: Callable[[], list[Any]]
    build: Callable[..., Build]
    functions: Callable[[], Mapping[str, Any]]
    covered: Sequence[Check] = ()
    covered_ahead: Sequence[Check] | None = None

    @property
    def spec(self) -> OpSpec:
        return self.plan.spec

    @property
    def folder(self) -> Path:
        """The op's folder; the archive's source hash covers its plan and kernels."""
        return Path(str(import_module(self.spec.package).__file__)).parent

    @cached_property
    def _rules(self) -> dict[bool, list[Any]]:
        ahead = self.covered if self.covered_ahead is None else self.covered_ahead
        return {False: self.plan.compiled.compile_checks(self.covered), True: self.plan.compiled.compile_checks(ahead)}

    def refusals(self, call: Call, ahead: bool = False) -> list[str]:
        """Why no kernel covers a call, one line per property with what is covered; empty if one does."""
        return list(self.plan.compiled.failures(self._rules[ahead], call.environment()))

    def variant_of(self, call: Call) -> Any:
        """The variant that serves a call.

        Raises:
            UnsupportedError: A shape or type that the variant follows from is not known.
        """
        key = self.plan.key_of(call)
        unknown = [name for name in self.plan.key if name not in key]
        if unknown:
            raise UnsupportedError(
                f"{self.spec.name}: {', '.join(unknown)} of the kernel does not follow from the shapes that are known."
            )
        return self.variant(**key)

    def element_types(self, variant: Any) -> dict[str, str]:
        """Element type of every pointer that the plan can pass to kernels of a variant."""
        attributes = {a.name: getattr(variant, a.name, a.default) for a in self.spec.attributes}
        return self.plan.element_types(Call({}, attributes, dtype=variant.dtype, count_dtype=variant.count_dtype))

    def check(self) -> None:
        """Raise ConfigError where the parts do not go together; a test calls it."""
        fields = {f.name for f in dataclasses.fields(self.variant)}
        if fields != set(self.plan.key) or not {"dtype", "count_dtype"} <= fields:
            raise ConfigError(
                f"{self.spec.name}: variants have {sorted(fields)}, the plan's key {sorted(self.plan.key)}."
            )
        functions = self.functions()
        launches = list(self.plan.launches())
        wrong = [
            f"the plan launches the unknown kernel {launch.kernel}"
            for launch in launches
            if launch.kernel not in functions
        ]
        for name, function in functions.items():
            mine = [set(launch.arguments) for launch in launches if launch.kernel == name]
            wrong += [] if mine else [f"the plan does not launch {name}"]
            for parameter in function.params:
                if parameter.name.startswith("d_"):
                    if parameter.name.removeprefix("d_") not in self.plan.compiled.matrices:
                        wrong.append(f"{name} takes the descriptor {parameter.name}, of which the plan has no matrix")
                    continue
                plain, pointer = parameter.name.removeprefix("p_"), parameter.name.startswith("p_")
                if not (
                    pointer
                    or parameter.is_constexpr
                    or plain in self.plan.arguments
                    or all(plain in own for own in mine)
                ):
                    wrong.append(f"{name} takes {plain}, which the plan does not pass")
                if not (pointer or parameter.is_constexpr or parameter.do_not_specialize or self._real(plain)):
                    wrong.append(f"{name} specialises {plain}, which changes from call to call")
            wrong += [f"{name} has no argument {extra}" for extra in set().union(*mine) - set(function.arg_names)]
        if wrong:
            raise ConfigError(f"{self.spec.name}: {'; '.join(wrong)}.")

    def _real(self, name: str) -> bool:
        return name in self.plan.arguments and self.plan.compiled.arguments[name].kind == "real"


def imported(module: str, name: str) -> Callable[[], Any]:
    """A function that imports a module and returns its attribute `name`: Triton and torch load slowly, and may be missing."""
    return lambda: getattr(import_module(module), name)


def later(module: str, name: str) -> Callable[..., Any]:
    """A function that imports a module's function when called."""
    return lambda *arguments: imported(module, name)()(*arguments)


@dataclass(frozen=True)
class Op:
    """One op as `still_kernels.registry` finds it: `OP` in `plan` of its folder.

    kernels: What is launched, and what kernels are compiled for.
    """

    kernels: OpKernels


def op_with_state(
    plan: Plan,
    variant: type[Any],
    defaults: Callable[[], list[Any]],
    tiles: Callable[[Any, int], TileTable],
    constants: Callable[[Any], dict[str, Any]],
    *,
    module: str,
    blocks: Mapping[str, str],
    absent: Callable[[Any], Iterable[str]] = lambda variant: (),
    covered: Sequence[Check],
) -> Op:
    """The op of a plan whose Triton functions are `FUNCTIONS` of a module; other arguments: see `OpKernels` and `builder`."""
    build = builder(tiles, constants, blocks, absent)
    return Op(OpKernels(plan, variant, defaults, build, imported(module, "FUNCTIONS"), covered))
