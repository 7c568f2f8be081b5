"""Launch plans: kernels, grids, arguments and workspace of one call of an op. Data, written once per op.

An op's `plan.py` writes a `Plan` in strings, in the language of `expressions.py`. The archive's index contains it (`Plan.data`). The
Python launcher (`launcher.py`) and the C++ core (plugins/core) both execute it, so a new op needs no C++:

    PLAN = Plan(
        SPEC,
        constants=("block",),                                   # integers that each compiled variant defines
        key={"dtype": "dtype", "head_dim": "D"},                # which variant serves a call
        checks=(Check("H % HK == 0", "H={H} is no multiple of HK={HK}."),),
        define={"parts": "ceil_div(N, 512)"},
        workspace=(Region("partial", "float32", ("B", "H", "parts", "D"), when="parts > 1"),),
        arguments={"T": "T", "NS": "parts", "scale": "rsqrt(D)"},
        steps=(
            Branch("T == 1", (Launch("decode", ("H", "parts", "B")),), (
                Loop("first", "0", "T", "block", (Launch("prefill", ("H", "B", "1"), first="first"),)),
            )),
        ),
    )

Pointers of a kernel are named without p_. They are a tensor of the op, `query_start` and `state_row` of packed sequences, a workspace or
persistent region, or an alias. A present state has its plain name, or `present_<name>` if an input has that name. Tensors that the call
lacks are null. Integers and reals come from the step, then from the plan; the remaining arguments are constants of the compiled kernel.

Padded sequences are [B, T, ...]; `tokens` is B * T and `rows` is B. Packed sequences are [tokens, ...] with states of `rows` rows. The call
uses B of these rows, and T is then the longest sequence. A call without sequences or tokens launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

from still_graphs.errors import UnsupportedError
from still_kernels.plan.compiled import Compiled
from still_kernels.plan.parts import (
    ELEMENTS,
    Alias,
    Branch,
    Buffer,
    Call,
    Check,
    Launch,
    Launched,
    Launches,
    Let,
    Loop,
    Matrix,
    PlanParts,
    Region,
    Step,
)

__all__ = [
    "ELEMENTS",
    "Alias",
    "Branch",
    "Buffer",
    "Call",
    "Check",
    "Launch",
    "Launched",
    "Launches",
    "Let",
    "Loop",
    "Matrix",
    "Plan",
    "Region",
    "Step",
]


class Plan(PlanParts):
    """The launches of an op; the module's docstring explains the parts.

    Args:
        spec: The op.
        steps: Launches in order.
        key: Properties that kernels are compiled for, by name, with their value for a call. Constants are not available.
        constants: Integers that a compiled variant defines: block sizes that grids or regions depend on.
        checks: Conditions on shapes and attributes, in order. Constants and defined names are not available.
        define: Names in order of definition.
        arguments: Integer and real kernel arguments by name.
        types: Names of element types, each an expression whose value is a key of `ELEMENTS`.
        workspace, persistent: Regions in order; persistent ones are int32.
        aliases: Further names of tensors.
        matrices: Rows and columns of tensors that kernels receive as descriptors.
        measured_tokens: Values of T at which a call may need more workspace than at the largest T; every batch is measured at each.

    Raises:
        ConfigError: On first use: an expression is wrong, a name is taken, or steps are nested too deeply.
    """

    @cached_property
    def compiled(self) -> Compiled:
        """The plan with its expressions checked."""
        return Compiled(self)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The plan as stored in the archive's index."""
        return self.compiled.data()

    def check(self, call: Call) -> None:
        """Raise UnsupportedError with the message of the first check that fails."""
        for failure in self.compiled.failures(self.compiled.checks, call.environment()):
            raise UnsupportedError(f"{self.spec.name}: {failure}")

    def key_of(self, call: Call) -> dict[str, int | str]:
        """Key of the variant that serves a call, without properties that depend on unknown values.

        `if` evaluates only the chosen side, so values of inputs that the call lacks may be unknown.
        """
        env, key = call.environment(), {}
        for name, value in self.compiled.key.items():
            with suppress(KeyError):
                key[name] = value(env)
        return key

    def launches(self) -> Iterator[Launch]:
        """Every launch of the plan, once."""
        left: list[Step] = list(self.steps)
        while left:
            match left.pop(0):
                case Launch() as launch:
                    yield launch
                case Loop(body=body):
                    left += body
                case Branch(then=then, otherwise=otherwise):
                    left += [*then, *otherwise]

    def evaluate(self, call: Call) -> Launches:
        """Launches of one call."""
        return self.compiled.evaluate(call.environment())

    def element_types(self, call: Call) -> dict[str, str]:
        """Element type of every pointer that the plan can pass, by name; `call` has the values that `types` use."""
        env = call.environment()
        kinds = {"T": call.dtype or "", "int64": call.count_dtype or "", "float32": "float32", "int32": "int32"}
        inputs = {t.name: kinds[t.dtype] for t in (*self.spec.inputs, *self.spec.outputs)}
        # Kernels read the codes of words.
        states = {
            state.name: "int8" if state.resolve(call.attributes) != state else kinds[state.dtype]
            for state in self.spec.states
        }
        found = {f"present_{name}": kind for name, kind in states.items()} | states | inputs
        for region in (*self.compiled.workspace, *self.compiled.persistent):
            found[region.name] = region.element(env)
        return found | {alias.name: found[alias.tensor] for alias in self.aliases if alias.name not in found}
