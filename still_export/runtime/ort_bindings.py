"""Inputs and outputs of a model's calls, bound to fixed memory in ONNX Runtime. Exports copy this file into packages."""

from __future__ import annotations

from typing import Any
from weakref import proxy

from still_export.runtime.ort_states import ONNX_TYPES
from still_graphs.states import AHEAD, LAST_HIDDEN, REPLAY

GUESSED, APART, FOLDED = "guessed", "apart", "folded"
"""Calls with guesses whose rejection needs no change of states; those that write new states to a second buffer; and folds, which apply the
accepted tokens to the states before."""


def replayed(session: Any) -> list[str]:
    """Outputs of a call with guesses that the fold reads."""
    return [value.name for value in session.get_outputs() if value.name.startswith(REPLAY)]


class Bindings:
    """A binding for each kind of call, kept until the states' buffers change.

    Attributes:
        adapter: Values of a LoRA adapter's inputs.
        image_inputs: Values of image inputs, for one call.
    """

    def __init__(self, model: Any) -> None:
        self.model = proxy(model)  # an OrtModel, which imports this file; its memory goes with its last user
        self.adapter: dict[str, Any] = {}
        self.image_inputs: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        self._bound: dict[tuple[int, int, int, int, str], tuple[Any, dict[str, Any]]] = {}

    def of(self, first: int, sequences: int, tokens: int, output: str) -> tuple[Any, dict[str, Any]]:
        """Returns (binding, inputs to fill in) for calls with `tokens` tokens of each of `sequences` sequences from `first` on.

        Args:
            output: The output that is read first, or GUESSED, APART, FOLDED or AHEAD.
        """
        key = first, sequences, tokens, self.model.states.turn, output
        if key not in self._bound:
            for other in [k for k in self._bound if k[2] > 1 + self.model.guesses and k[2] != tokens]:
                del self._bound[other]
            self._bound[key] = self._bind(first, sequences, tokens, output)
        return self._bound[key]

    def _bind(self, first: int, sequences: int, tokens: int, output: str) -> tuple[Any, dict[str, Any]]:
        model, values = self.model, self.model.values
        session = model.fold if output == FOLDED else model.session
        shapes: dict[str, tuple[int, ...]]
        shapes = {"input_ids": (sequences, tokens), "new_tokens": (sequences,), "past_length": (sequences,)}
        if output == AHEAD and model.head:
            session, channels = model.head.session, model.manifest["model"]["hidden_size"]
            shapes = {AHEAD + name: shape for name, shape in shapes.items()}
            shapes[f"{AHEAD}hidden"] = sequences, tokens, channels
        binding = session.io_binding()
        # On the session's device: a host array would be copied there when it is bound, before it is filled.
        inputs = {n: values.zeros(s, "int64" if len(s) < 3 else "float32") for n, s in shapes.items()}
        read = {value.name for value in session.get_inputs()}
        for name, value in (*inputs.items(), *self.adapter.items(), *self.image_inputs.items()):
            if output != FOLDED or name in read:  # an adapter's inputs have defaults, which a session does not name
                binding.bind_ortvalue_input(name, value)
        if output == FOLDED:
            guessed, _ = self._bound[first, sequences, tokens, model.states.turn, APART]
            # The first two are logits and length.
            for name, value in zip(replayed(model.session), guessed.get_outputs()[2:], strict=False):
                binding.bind_ortvalue_input(name, value)
        self._bind_outputs(session, binding, output)
        self._bind_states(binding, read, first, sequences, output == APART)
        return binding, inputs

    def _bind_outputs(self, session: Any, binding: Any, output: str) -> None:
        there = [value.name for value in session.get_outputs()]
        on_device = replayed(session) if output == APART else []  # for the fold
        logits = "logits" if output in (GUESSED, APART) else output
        names = [logits, "present_length", *on_device, *self.model.watched, LAST_HIDDEN]
        for name in names if output != AHEAD else (f"{AHEAD}logits", AHEAD + LAST_HIDDEN):
            if name in there:
                binding.bind_output(name, self.model.device if name in on_device else "cpu")

    def _bind_states(self, binding: Any, read: set[str], first: int, sequences: int, apart: bool) -> None:
        states, batch = self.model.states, self.model.batch
        for state in states.table:
            if state.past not in read:
                continue
            past, present = states.past[state.name], states.present(state, apart)
            shape = [sequences, *past.shape()[1:]]
            if sequences < batch and past.tensor_size_in_bytes():  # the batch is the first dimension
                for bind, name, value in (
                    (binding.bind_input, state.past, past),
                    (binding.bind_output, state.present, present),
                ):
                    address = value.data_ptr() + first * value.tensor_size_in_bytes() // batch
                    bind(name, self.model.device, 0, ONNX_TYPES[state.dtype], shape, address)
                continue
            if sequences < batch:
                past = present = self.model.values.zeros(shape, state.dtype)
            binding.bind_ortvalue_input(state.past, past)
            binding.bind_ortvalue_output(state.present, present)
