"""Calls of ops without a state for bench and tune: `Calls` of each, as the `OpWork` that both ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.common.launches import outputs_of
from still_kernels.common.stateless import StatelessOp
from still_kernels.plan import Call
from still_kernels.sizes import tensors_of
from still_kernels.tile import Setting, TileTable
from tools.kernels.work import Held, Kind, OpWork, Work, kinds

SIZES = {"heads": 32, "kv_heads": 8, "head_dim": 128, "width": 14336, "vocabulary": 128256}
"""Of Llama-3.1-8B."""


class Draw:
    """Random tensors of a call: activations stay the same, weights are new for each state, and the same each time."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: str) -> None:
        self.kind, self.dtype, self.device = kind, dtype, device
        self._kept: list[Tensor] = []
        self._new: list[Tensor] = []

    def held(self, inputs: Callable[[Draw], Any]) -> Held:
        """Inputs of a further state."""
        self._index, self._new = 0, []
        self._generator = None if self.device == "meta" else torch.Generator(self.device).manual_seed(0)
        made = inputs(self)
        return Held(made, tuple(name for name, x in tensors_of(made).items() if any(x is new for new in self._new)))

    def tokens(self, *sizes: int) -> Tensor:
        """Activations [B, T, *sizes]."""
        if self._index == len(self._kept):
            shape = (self.kind.batch, self.kind.tokens, *sizes)
            self._kept.append(torch.randn(shape, device=self.device).to(self.dtype))
        self._index += 1
        return self._kept[self._index - 1]

    def weight(self, *shape: int, turned: bool = False) -> Tensor:
        """A weight [I, O], whose outputs are of the size of what it multiplies, or as [O, I]; a vector as it is drawn."""
        drawn = torch.randn(shape, device=self.device, generator=self._generator)
        drawn = (drawn / shape[0] ** 0.5 if len(shape) > 1 else drawn).to(self.dtype)
        return self._own(drawn.T.contiguous() if turned else drawn)

    def stack(self, count: int, outputs: int, inputs: int) -> Tensor:
        """Weights [count, outputs, inputs]."""
        drawn = torch.randn((count, outputs, inputs), device=self.device, generator=self._generator, dtype=self.dtype)
        return self._own(drawn.div_(inputs**0.5))

    def chosen(self, count: int, k: int) -> Tensor:
        """k different ones of `count` for each token, int32 [B, T, k]."""
        shape = (self.kind.batch, self.kind.tokens, count)
        return torch.rand(shape, device=self.device, generator=self._generator).topk(k).indices.int()

    def shares(self, k: int) -> Tensor:
        """Numbers above 0 whose sum is 1 for each token, float32 [B, T, k]."""
        shape = (self.kind.batch, self.kind.tokens, k)
        return torch.randn(shape, device=self.device, generator=self._generator).softmax(-1)

    def norm(self, size: int) -> Tensor:
        """The weight of a norm."""
        drawn = torch.rand(size, device=self.device, generator=self._generator)
        return self._own(drawn.to(self.dtype) + 0.5)

    def fresh(self, *sizes: int) -> Tensor:
        """Activations that a step must not find in the cache."""
        shape = (self.kind.batch, self.kind.tokens, *sizes)
        return self._own(torch.randn(shape, device=self.device, generator=self._generator).to(self.dtype))

    def scales(self, *shape: int) -> Tensor:
        """Scales of blocks of a low-bit weight."""
        return self._own(torch.rand(shape, device=self.device, generator=self._generator).to(self.dtype) / 64)

    def words(self, *shape: int) -> Tensor:
        """Words of codes, int32."""
        most, draw = 2**31, torch.randint
        return self._own(draw(-most, most - 1, shape, dtype=torch.int32, device=self.device, generator=self._generator))

    def _own(self, made: Tensor) -> Tensor:
        self._new.append(made)
        return made


@dataclass(frozen=True)
class Calls:
    """What bench and tune ask of an op.

    Args:
        draw: Inputs of a call, from sizes, kind of layer and what draws them.
        flop: Of the call with these inputs.
        moves: What tune tries from the current setting and then from better ones, by kernel.
        decode: Those of `moves` that belong to a step.
        layers: Kinds of layers; the first is what tune takes.
        instead: As of `tools.kernels.work.OpWork`.
        peer: Whose operators `plain` takes.
        sizes: Beside those that all models have.
        plain: The op by PyTorch's operators in the activations' own type, of what `beside` makes; results as those of the definition,
            which it is by default.
        beside: What `plain` takes in the place of inputs, made once for each state.
        unread: Bytes of the inputs that a call need not read.
        others: The libraries that are there, each with what makes, of inputs, a call of its own operators.
        one_token: Whether calls have no more.
    """

    draw: Callable[[Mapping[str, int], str, Draw], Any]
    flop: Callable[[Any], float]
    moves: Mapping[str, list[Setting]]
    decode: frozenset[str] = frozenset()
    layers: Sequence[str] = ("",)
    instead: Mapping[str, str] = field(default_factory=dict)
    peer: str = "PyTorch"
    sizes: Mapping[str, int] = field(default_factory=dict)
    plain: Callable[[Any], Tensor | tuple[Tensor, ...]] | None = None
    beside: Callable[[Any], Any] = lambda inputs: inputs
    unread: Callable[[Any], int] = lambda inputs: 0
    others: Callable[[], Mapping[str, Callable[[Any], Callable[[], Any]]]] = dict
    one_token: bool = False


def one_token(context: int, batches: Sequence[int]) -> list[Kind]:
    """A step of one sequence."""
    return [Kind("decode", 1, 1, context - 1)]


Layer = tuple[Mapping[str, int], str]
"""Sizes of a model, and the kind of layer."""


def work_of_calls(op: StatelessOp, calls: Calls) -> OpWork:
    """What bench and tune ask of an op."""
    spec = op.kernels.spec

    def drawn(layer: Layer, draw: Draw) -> Held:
        held = draw.held(lambda draw: calls.draw(*layer, draw))
        return replace(held, beside=calls.beside(held.inputs))

    def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
        draw = Draw(kind, dtype, device)
        inputs = drawn(layer, draw).inputs
        outputs = outputs_of(spec, inputs)

        def launch(state: Held, output: Tensor, table: TileTable) -> None:
            parts = output.view(-1).split([x.numel() for x in outputs])  # one behind the other
            op.launch(
                state.inputs, *(p.view(x.dtype).view(x.shape) for p, x in zip(parts, outputs, strict=True)), table=table
            )

        def plain(state: Held) -> Tensor:
            if calls.plain is None:
                return _joined(op.definition.__wrapped__(state.beside, dtype))  # type: ignore[attr-defined]
            return _joined(calls.plain(state.beside))

        def peer(make: Callable[[Any], Callable[[], Any]]) -> Callable[[Held], Tensor]:
            made: dict[
                int, tuple[Held, Callable[[], Any]]
            ] = {}  # once for each state, which is kept so that its number stays its own

            def run(state: Held) -> Tensor:
                if id(state) not in made:
                    made[id(state)] = state, make(state.inputs)
                return _joined(made[id(state)][1]())

            return run

        return Work(
            float(sum(x.nbytes for x in (*tensors_of(inputs).values(), *outputs)) - calls.unread(inputs)),
            calls.flop(inputs),
            state=lambda: drawn(layer, draw),
            reference=plain,
            run=lambda state: _joined(op(state.inputs)),
            launch=launch,
            output=torch.empty_like(_joined(outputs)),
            peers={calls.peer: plain, **{name: peer(make) for name, make in calls.others().items()}}
            if device == "cuda"
            else {},
        )

    def table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
        draw = Draw(Kind("", 1, 1, 0), torch.float16, "meta")
        inputs = draw.held(lambda draw: calls.draw(*layer, draw)).inputs
        shapes = {name: x.shape for name, x in tensors_of(inputs).items()}
        call = Call.of(spec, shapes, {a.name: getattr(inputs, a.name) for a in spec.attributes}, "float16", None)
        return op.tiles(op.kernels.variant_of(call), launcher.arch_of(device))

    return OpWork(
        sizes={**SIZES, **calls.sizes},
        layers=dict.fromkeys(calls.layers),
        layer=lambda sizes, name, context: (sizes, name),
        work=work,
        table=table,
        moves=calls.moves,
        decode=calls.decode,
        instead=calls.instead,
        kinds=one_token if calls.one_token else kinds,
        dtypes=tuple(dtype for dtype in OpWork.dtypes if dtype in op.kernels.variant.DTYPES),
    )


def _joined(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Several results one behind the other."""
    if isinstance(results, Tensor):
        return results
    return results[0] if len(results) == 1 else torch.cat([x.flatten() for x in results])
