"""STILL families in vLLM: vLLM's llama and experts models with our attention in their layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.models import qwen3_moe
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.transformers_utils.config import get_safetensors_params_metadata

from still_export.models.build import family_of
from still_export.models.families.experts import STACKED, single_experts
from still_export.serving.vllm.attention import ServedAttention
from still_export.serving.vllm.config import find_quantized, keep_experts
from still_export.serving.vllm.pages import common_pages, linear_state


class StatesMixin(HasInnerState, IsHybrid):  # type: ignore[misc]  # vLLM is untyped
    """vLLM's interface of models with states, whether all layers are hybrid or some are softmax."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        model = vllm_config.model_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        linear = linear_state(vllm_config.cache_config)
        return ((common_pages(model.hf_config, model.max_model_len, model.dtype, ranks, linear).size_bytes,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (torch.int8,)


def attention_of(vllm_config: Any) -> Any:
    """A factory of a layer's attention; its parts are read from transformers' model of the family."""
    config = vllm_config.model_config.hf_config
    find_quantized(vllm_config.quant_config, getattr(config, "quantization_config", None))
    with torch.device("meta"):
        like = family_of(config.model_type).still_model(config).model.layers
    return partial(ServedAttention, like, config=config)


class StillForCausalLM(LlamaForCausalLM, StatesMixin):  # type: ignore[misc]
    """A llama-like model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        layer = partial(LlamaDecoderLayer, attn_layer_type=attention_of(vllm_config))
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)


class StillExpertsForCausalLM(qwen3_moe.Qwen3MoeForCausalLM, StatesMixin):  # type: ignore[misc]
    """A model with Qwen3's experts, multiplied by vLLM's fused_moe."""

    # Packed projections of layers without experts; vLLM adds these only after it configured quantization.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **qwen3_moe.Qwen3MoeForCausalLM.packed_modules_mapping,
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model = vllm_config.model_config
        if getattr(model.hf_config, "quantization_config", None):
            stored = get_safetensors_params_metadata(model.model, revision=model.revision)
            if any(name.endswith(STACKED) for name in stored):
                keep_experts(vllm_config.quant_config)
        with _layers_with(attention_of(vllm_config)):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(single_experts(weights))
        return loaded


@contextmanager
def _layers_with(attention: Any) -> Iterator[None]:
    """Build Qwen3's layers with another attention inside the block; unlike Llama's, vLLM's class has no argument for it."""
    own = qwen3_moe.Qwen3MoeAttention
    qwen3_moe.Qwen3MoeAttention = attention
    try:
        yield
    finally:
        qwen3_moe.Qwen3MoeAttention = own
