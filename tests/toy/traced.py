"""The traced form: the torch op of still::Decay's spec."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from still_graphs.spec import AttributeValue
from still_kernels.torch_ops import Given, call, register
from tests.toy.meaning import naive_decay
from tests.toy.spec import DECAY


def _compute(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    output, total = naive_decay(
        tensors["value"], tensors["new_tokens"], tensors["past_total"], float(attributes["decay"])
    )
    return {"output": output, "present_total": total}


register(DECAY, _compute)


def decay(given: Given, rate: float) -> dict[str, Tensor]:
    """Call the op with inputs and states by name: outputs and states after the call, by name."""
    return call(DECAY, given, {"decay": rate})
