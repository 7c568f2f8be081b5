"""Random models that are published with a head that guesses tokens ahead (MTP), and what it says by their own classes."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.still_export.expert_models import SPARSE, expert_model
from tests.still_export.linear_models import linear_model

_ONE: dict[str, Any] = dict(num_hidden_layers=1, layer_types=["full_attention"])
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _ONE,
    "qwen3_5_moe": _ONE,
    "qwen3_next": dict(_ONE, mlp_only_layers=[]),
    "nemotron_h": dict(layer_types=["full_attention", "moe"]),
    "bailing_hybrid": dict(_ONE, mlp_layer_types=["sparse"]),
}
"""Families, and what their configurations say of a head's own layers."""


@dataclass
class Published:
    """A model of transformers, and the parts of its head in the same type: the layers as a model of theirs, what is around them."""

    model: Any
    layers: Any
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    fc: Tensor

    @property
    def norm(self) -> Any:
        """Behind the head's layers."""
        return getattr(self.layers.model, "norm", None) or self.layers.model.norm_f

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The head's, under the names of published folders."""
        kind = self.model.config.model_type
        own = {n.removeprefix("model."): x for n, x in self.layers.state_dict().items() if ".layers." in n}
        around = [x.weight for x in (self.embedding_norm, self.hidden_norm, self.norm)]
        if kind.startswith("qwen"):
            names = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc"]
            own = {f"mtp.{name}": x for name, x in own.items()}
        elif kind == "nemotron_h":
            names = ["mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm", "mtp.layers.0.eh_proj"]
            own = {f"mtp.{name}": x for name, x in own.items()}
        else:
            at = f"model.layers.{self.model.config.num_hidden_layers}"
            names = [f"{at}.enorm", f"{at}.hnorm", f"{at}.final_layernorm", f"{at}.eh_proj"]
            own = {name.replace("layers.0", at): x for name, x in own.items()}
            own[f"{at}.shared_head.head.weight"] = self.model.lm_head.weight
        return own | {f"{name}.weight": x for name, x in zip(names, (*around, self.fc), strict=True)}

    def save(self, folder: Path) -> None:
        """Write the folder."""
        self.model.save_pretrained(folder)
        file = folder / "model.safetensors"
        save_file(
            {**load_file(file), **{n: x.detach().clone() for n, x in self.tensors.items()}}, file, {"format": "pt"}
        )

    @torch.no_grad()
    def logits(self, tokens: list[int], more: list[int]) -> Tensor:
        """Of the head behind each of `more` [n, V], float64: the first of them follows `tokens`, the others are guesses behind it."""
        wide = self.wide
        hidden = wide.model.model(torch.tensor([tokens])).last_hidden_state
        ids, found = torch.tensor([tokens[1:]], dtype=torch.int64), []
        for token in more:
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            embedded = wide.embedding_norm(wide.model.get_input_embeddings()(ids))
            given = torch.cat([embedded, wide.hidden_norm(hidden)], dim=-1) @ wide.fc.T
            made = wide.layers.model(inputs_embeds=given).last_hidden_state
            found.append(wide.model.lm_head(made[0, -1]))
            hidden = torch.cat([hidden, made[:, -1:]], dim=1)
        return torch.stack(found)

    @cached_property
    def wide(self) -> "Published":
        """In float64, as it was when it was first asked for."""
        return copy.deepcopy(self).double()

    def double(self) -> "Published":
        """In float64."""
        for part in (self.model, self.layers, self.embedding_norm, self.hidden_norm):
            part.double()
        self.fc = self.fc.double()
        return self


def published(family: str, **changes: Any) -> Published:
    """A model of a name of LAYERS with its head."""
    maker = expert_model if family in SPARSE else linear_model
    behind: dict[str, Any] = {"num_nextn_predict_layers": 1} if family in ("nemotron_h", "bailing_hybrid") else {}
    model = maker(family, **{**changes, **behind})
    layers = maker(family, seed=1, **{**changes, **LAYERS[family]})
    generator, size = torch.Generator().manual_seed(3), model.config.hidden_size
    found = Published(model, layers, nn.Identity(), nn.Identity(), torch.randn(size, 2 * size, generator=generator))
    found.fc /= (2 * size) ** 0.5
    found.embedding_norm, found.hidden_norm = (copy.deepcopy(found.norm) for _ in range(2))
    for norm in (found.embedding_norm, found.hidden_norm):
        norm.weight.data += 0.3 * torch.randn(size, generator=generator)  # type: ignore[operator]
    return found


def right_by_construction(**changes: Any) -> Published:
    """What follows a token depends on it alone, and the head reads it beside what the model made of the one before: all guesses hold."""
    found = published("qwen3_5_text", **changes)
    with torch.no_grad():
        for model in (found.model, found.layers):
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "model.norm.weight")):
                    weight.zero_()
        for norm in (found.embedding_norm, found.hidden_norm):
            norm.weight.zero_()
        size = found.model.config.hidden_size
        found.fc = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    return found
