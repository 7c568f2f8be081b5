"""The traced form: the torch op `still::test_time_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.spec import AttributeValue
from still_kernels.test_time_memory.meaning import Inputs, MemoryState
from still_kernels.test_time_memory.meaning import read_and_learn as compute
from still_kernels.test_time_memory.spec import TEST_TIME_MEMORY


def _computed(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    tensors: dict[str, Any] = {**given, **attributes}
    state = MemoryState(*(tensors.pop(f"past_{name}") for name in MemoryState._fields))
    output, after = compute(Inputs(**tensors), state)
    return {"output": output, **{f"present_{name}": x for name, x in after._asdict().items()}}


register(TEST_TIME_MEMORY, _computed)


def read_and_learn(inputs: Inputs, state: MemoryState) -> tuple[Tensor, MemoryState]:
    """As of the kernels; one node where a program is traced, which has no derivative."""
    if not torch.compiler.is_compiling():
        return compute(inputs, state)
    given = {**vars(inputs), **{f"past_{name}": x for name, x in state._asdict().items()}}
    results = call(TEST_TIME_MEMORY, given, {"chunk_size": inputs.chunk_size, "memory_update": inputs.memory_update})
    return results["output"], MemoryState(*(results[f"present_{name}"] for name in MemoryState._fields))
