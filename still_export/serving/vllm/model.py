"""Every STILL family of the llama kind in vLLM: its own model of that kind, with our attention in its layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from still_export.models.build import family_of
from still_export.serving.vllm.attention import ServedAttention
from still_export.serving.vllm.config import find_quantized
from still_export.serving.vllm.pages import common_pages, linear_state


class StillForCausalLM(LlamaForCausalLM, HasInnerState, IsHybrid):  # type: ignore[misc]  # vLLM has no types here
    """A STILL model, all layers hybrid or some softmax. What a layer has is read from transformers' model of the family."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        find_quantized(vllm_config.quant_config, getattr(config, "quantization_config", None))
        with torch.device("meta"):
            like = family_of(config.model_type).still_model(config).model.layers
        attention = partial(ServedAttention, like)
        layer = partial(LlamaDecoderLayer, attn_layer_type=attention)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        model = vllm_config.model_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        linear = linear_state(vllm_config.cache_config)
        return ((common_pages(model.hf_config, model.max_model_len, model.dtype, ranks, linear).size_bytes,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (torch.int8,)
