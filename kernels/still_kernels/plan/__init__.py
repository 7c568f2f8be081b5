"""Launch plans: which kernels one call of an op runs, on what grids, with what arguments and workspace. Data, written once per op.

An op's `plan.py` writes a `Plan` in strings, in the language of `expressions.py`. The archive's index carries it (`Plan.data`); the
Python launcher (`launcher.py`) and the C++ core (plugins/core) execute it alike, so a second op needs no C++:

    PLAN = Plan(
        SPEC,
        constants=("block",),                                   # integers that each compiled variant brings
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

A kernel's pointers go by name without p_: a tensor of the op (a state's present one by its plain name, or by `present_<name>` where an
input has that), `query_start` and `state_row` of packed sequences, a workspace or persistent region, an alias. What a call does not have is
null. Its integers and reals are those of the step, then those of the plan; what is left over are constants of the compiled kernel.

Padded sequences are [B, T, ...]; `tokens` is B * T and `rows` is B. Packed ones are [tokens, ...] with states of `rows` rows, of which the
call has B; T is then the most tokens of a sequence. A call without sequences or tokens launches nothing.
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
    """The launches of an op; the module's docstring explains the parts."""

    @cached_property
    def compiled(self) -> Compiled:
        """The plan with its expressions checked."""
        return Compiled(self)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The plan as the archive's index carries it."""
        return self.compiled.data()

    def check(self, call: Call) -> None:
        """Raise UnsupportedError with the message of the first check that fails."""
        for failure in self.compiled.failures(self.compiled.checks, call.environment()):
            raise UnsupportedError(f"{self.spec.name}: {failure}")

    def key_of(self, call: Call) -> dict[str, int | str]:
        """Key of the variant that serves a call; what follows from something unknown is left out.

        Only the side that `if` takes is asked: what an input tells that a call does not have need not be known.
        """
        env, key = call.environment(), {}
        for name, value in self.compiled.key.items():
            with suppress(KeyError):
                key[name] = value(env)
        return key

    def launches(self) -> Iterator[Launch]:
        """Every launch that the plan names, once."""
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
        """What one call launches."""
        return self.compiled.evaluate(call.environment())

    def element_types(self, call: Call) -> dict[str, str]:
        """Element type of every pointer that the plan can pass, by name; `call` has what `types` follow from."""
        env = call.environment()
        kinds = {"T": call.dtype or "", "int64": call.count_dtype or "", "float32": "float32", "int32": "int32"}
        inputs = {t.name: kinds[t.dtype] for t in (*self.spec.inputs, *self.spec.outputs)}
        # Kernels see the codes of words.
        states = {
            state.name: "int8" if state.resolve(call.attributes) != state else kinds[state.dtype]
            for state in self.spec.states
        }
        found = {f"present_{name}": kind for name, kind in states.items()} | states | inputs
        for region in (*self.compiled.workspace, *self.compiled.persistent):
            found[region.name] = region.element(env)
        return found | {alias.name: found[alias.tensor] for alias in self.aliases if alias.name not in found}
