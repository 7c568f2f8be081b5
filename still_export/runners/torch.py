"""The PyTorch reference behind the package's own interface: named arrays in, named arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.cache import empty_states
from still_export.models import forward_with_state
from still_export.package.calls import Arrays


class TorchRunner:
    """Runs a STILL model on the feeds of an exported graph.

    Args:
        model: A STILL model of any family.
        all_logits: As the package was exported.
    """

    def __init__(self, model: Any, all_logits: bool = False) -> None:
        self.model = model.eval()
        self.all_logits = all_logits

    def empty_feed(self, batch: int, capacity: int) -> Arrays:
        """`past_length` and `past_*` of rows that have seen nothing, with room for `capacity` tokens."""
        layers = empty_states(self.model.config, batch, self.model.dtype, capacity=capacity)
        feed = {f"past_{name}.{i}": x.numpy() for i, layer in enumerate(layers) for name, x in layer.items()}
        feed["past_length"] = np.zeros(batch, np.int64)
        return feed

    @torch.no_grad()
    def infer(self, feed: Arrays) -> Arrays:
        """Outputs of one call: `logits` float32, `present_<state>.<layer>`, `present_length`."""
        layers: list[dict[str, Tensor]] = [{} for _ in range(self.model.config.num_hidden_layers)]
        for name, array in feed.items():
            if name.startswith("past_") and name != "past_length":
                state, layer = name.removeprefix("past_").rsplit(".", 1)
                layers[int(layer)][state] = torch.from_numpy(array)
        counts, length = torch.from_numpy(feed["new_tokens"]), torch.from_numpy(feed["past_length"])
        logits, present = forward_with_state(
            self.model, torch.from_numpy(feed["input_ids"]), counts, length, layers, last_only=not self.all_logits
        )
        outputs = {"logits": logits.float().numpy()}
        outputs.update(
            {f"present_{name}.{i}": x.numpy() for i, layer in enumerate(present) for name, x in layer.items()}
        )
        outputs["present_length"] = (length + counts).numpy()
        return outputs
