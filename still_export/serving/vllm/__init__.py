"""STILL models in vLLM: `vllm serve FOLDER` finds them through the entry point vllm.general_plugins."""

from __future__ import annotations

OP = "vllm::still_paged"
"""The op around a layer's kernels. Compiled graphs are split at it, as at vLLM's own attention."""


def register() -> None:
    """Register families, their configuration, and stateful layers with vLLM; called in each of its processes."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    from still_export.models.families.softmax_families import (
        FAMILIES,  # which tells transformers of their configurations
    )
    from still_export.serving.vllm.config import EXPERTS, ServedConfig

    here = __name__
    register_backend(MambaAttentionBackendEnum.CUSTOM, f"{here}.backend.PagedBackend", is_mamba=True)
    known = ModelRegistry.get_supported_archs()
    for family in FAMILIES.values():
        architecture = family.still_model.__name__
        MODELS_CONFIG_MAP[architecture] = ServedConfig
        if architecture not in known:
            kind = "StillExpertsForCausalLM" if family.name in EXPERTS else "StillForCausalLM"
            ModelRegistry.register_model(architecture, f"{here}.model:{kind}")
    if OP not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OP)
