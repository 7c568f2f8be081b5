"""The models: Llama's layers around these mixers."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LlamaModelMixin, Place
from still_export.models.families.softmax_families import Published, make_family


class MeansConfigMixin(LinearConfigMixin):
    """All layers are alike."""

    def read_still(self) -> LayersConfig:
        config: Any = self
        config.layer_types = ["linear_attention"] * config.num_hidden_layers
        return super().read_still()


def _without_queries(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in tensors.items() if ".q_proj." not in name and ".k_proj." not in name}


class MeansModelMixin(LlamaModelMixin):
    """Layers without queries and keys."""

    def swap_mixers(self) -> None:
        super().swap_mixers()
        for layer in self.model.layers:
            del layer.self_attn.q_proj, layer.self_attn.k_proj


FAMILIES = (
    make_family(
        __name__,
        LlamaConfig,
        LlamaForCausalLM,
        (MeansConfigMixin, MeansModelMixin),
        title="ToyMeans",
        name="toy_means",
        linear=True,
        fields={"layer_types": (list[str] | None, None), "means": (bool, True)},
        published=Published(
            tensors=_without_queries,
        ),
        places={"linear_attention": Place("running_mean", ("self_attn",))},
    ),
)
