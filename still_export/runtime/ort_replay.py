"""Calls that ONNX Runtime replays from CUDA graphs. Exports copy this file into packages."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import proxy

import numpy as np

from still_export.runtime.ort_states import ONNX_TYPES
from still_graphs.states import AHEAD, LAST_HIDDEN, NEXT_TOKEN

ALIGNED = 32
"""Inputs start at multiples of so many 8-byte numbers, because kernels read aligned vectors."""
NO_GRAPH = -1
"""Number of the CUDA graph of calls that are not captured."""


class Captured(NamedTuple):
    """A captured call. `inputs` are to be filled in; `send` copies all of them to the device, where `outputs` lie."""

    binding: Any
    inputs: dict[str, np.ndarray]
    send: Callable[[], None]
    outputs: dict[str, Any]
    options: Any


class Replays:
    """The captured calls, by number of tokens and by the buffers with the states."""

    def __init__(self, model: Any) -> None:
        self.model = proxy(model)  # an OrtModel, as in Bindings
        self._count = 0  # captured so far
        self.clear()

    def clear(self) -> None:
        self.captured: dict[tuple[int, int], Captured] = {}

    def options(self, graph: int = NO_GRAPH) -> Any:
        """Run options with which the CUDA provider captures and replays the graph of this number; None where nothing is replayed."""
        if not self.model.replays:
            return None
        from onnxruntime import RunOptions

        options = RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options

    def run(self, input_ids: np.ndarray, counts: np.ndarray | None = None) -> dict[str, Any]:
        """Replay the call over `input_ids` [B, T] of all sequences, `counts` [B] of them new; None: one each. Returns the outputs, on the
        device."""
        call = self.capture(input_ids.shape[1])
        call.inputs["input_ids"][:], call.inputs["past_length"][:] = input_ids, self.model.length
        if counts is not None:
            call.inputs["new_tokens"][:] = counts
        call.send()
        self.model.session.run_with_iobinding(call.binding, call.options)
        return call.outputs

    def capture(self, tokens: int) -> Captured:
        """Capture the call of `tokens` tokens for the current buffers.

        ONNX Runtime runs the call more than once before it captures: with new_tokens of 0, which changes no state.
        """
        model, values, states = self.model, self.model.values, self.model.states
        if (tokens, states.turn) in self.captured:
            return self.captured[tokens, states.turn]
        binding = model.session.io_binding()
        shapes = {"input_ids": (model.batch, tokens), "new_tokens": (model.batch,), "past_length": (model.batch,)}
        apart = -(-model.batch * tokens // ALIGNED) * ALIGNED
        host = np.zeros((len(shapes), apart), np.int64)
        rows = zip(shapes.items(), host, strict=True)
        inputs = {name: row[: math.prod(shape)].reshape(shape) for (name, shape), row in rows}
        inputs["past_length"][:] = model.length
        device = values.tensor(host, "int64")
        for place, (name, shape) in enumerate(shapes.items()):
            address = device.data_ptr() + place * host[0].nbytes
            binding.bind_input(name, model.device, 0, ONNX_TYPES["int64"], list(shape), address)
        for name, value in model.bindings.adapter.items():
            binding.bind_ortvalue_input(name, value)
        sizes = model.manifest["model"]
        outputs = {
            "logits": values.zeros((model.batch, tokens, sizes["vocab_size"]), self._logit_type()),
            "present_length": values.zeros((model.batch,), "int64"),
        }
        if model.head:
            outputs[LAST_HIDDEN] = values.zeros((model.batch, tokens, sizes["hidden_size"]), "float32")
        if model.returns_token:
            outputs[NEXT_TOKEN] = values.zeros((model.batch, tokens), "int32")
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        for state in states.table:
            if not state.name.startswith(AHEAD):
                binding.bind_ortvalue_input(state.past, states.past[state.name])
                binding.bind_ortvalue_output(state.present, states.past[state.name])
        self._count += 1
        options = self.options(self._count)
        model.session.run_with_iobinding(binding, options)
        inputs["new_tokens"][:] = 1
        found = Captured(binding, inputs, partial(device.update_inplace, host), outputs, options)
        self.captured[tokens, states.turn] = found
        return found

    def _logit_type(self) -> str:
        found = next(o.type for o in self.model.session.get_outputs() if o.name == "logits")
        return {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}[found]
