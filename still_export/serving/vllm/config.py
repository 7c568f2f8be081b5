"""Settings that a STILL model changes in vLLM's configuration, and refusals at the start, one sentence each. No vLLM at import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from still_export.errors import ConfigError, UnsupportedError, UnsupportedModelError
from still_export.models.build import family_of
from still_export.serving.vllm.pages import common_pages, linear_state, paged_layers

PAGES_SHARE = 0.9
"""Share of GPU memory next to the weights for pages; activations and CUDA graphs use the rest."""
LEAST_CAPABILITY = 80
"""Compute capability of the oldest GPU with kernels."""

EXPERTS = ("qwen3_moe",)
"""Families with experts whose model in vLLM accepts our attention."""


class ServedConfig:
    """vLLM's hooks, called before a model is built; registered by architecture in its MODELS_CONFIG_MAP."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Limit the context to the capacity of the states, and mark the layers with states.

        Raises:
            ConfigError: --max-model-len exceeds the capacity.
            UnsupportedModelError: The model has experts of an unsupported kind; or see `paged_layers`.
        """
        config = model_config.hf_config
        family = config.model_type.removeprefix("still_")
        counts = (getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        if any(counts) and family not in EXPERTS:
            raise UnsupportedModelError(
                f"model_type={family}: of models with experts this plugin serves {', '.join(EXPERTS)}. Export it with --to onnx."
            )
        layers = paged_layers(config)
        # vLLM counts layers by kind in this attribute.
        config.layers_block_type = ["attention" if layer is None else "mamba" for layer in layers]
        requested = model_config.original_max_model_len
        model_config.max_model_len = context_length(config, model_config.max_model_len, requested not in (None, -1))

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse features that states do not support, switch prefix caching off, and limit the requests on a GPU.

        Raises:
            ConfigError, UnsupportedError, UnsupportedModelError: One sentence each.
        """
        from vllm.platforms import current_platform

        if vllm_config.speculative_config is not None:
            raise ConfigError(
                "speculative decoding needs states that can drop rejected tokens; those of a STILL model cannot. Leave out "
                "--speculative-config."
            )
        cache = vllm_config.cache_config
        if cache.enable_prefix_caching and cache.mamba_block_size is not None:
            vllm_config.model_config.hf_config.prefix_tokens = (
                cache.mamba_block_size
            )  # vLLM does not change this one later
            vllm_config.scheduler_config.scheduler_cls = f"{__package__}.scheduler.prefix_scheduler"
        elif cache.enable_prefix_caching:
            # This is vLLM's default for models with states; a user's request for it looks the same here.
            _log().warning(
                "prefix caching is switched off: cached states need much memory. --mamba-block-size 2048 with --enable-prefix-caching "
                "caches those after every 2,048 tokens; --no-enable-prefix-caching avoids this message."
            )
            cache.enable_prefix_caching = False
        if cache.mamba_block_size is None:
            cache.mamba_block_size = vllm_config.model_config.max_model_len
        capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
        check_device(
            vllm_config.model_config.hf_config,
            vllm_config.model_config.dtype,
            current_platform.device_type,
            None if capability is None else capability.to_int(),
            vllm_config.parallel_config.tensor_parallel_size,
        )
        if current_platform.is_cuda():
            bound_requests(vllm_config, current_platform.get_device_total_memory())


def bound_requests(vllm_config: Any, device_bytes: int) -> None:
    """Lower --max-num-seqs to the number of requests whose first pages fit into GPU memory, and log it.

    More requests never run at the same time. While measuring its CUDA graphs, vLLM also reserves a page for each allowed request, before it
    knows how much memory is left.

    Raises:
        ConfigError: No request's pages fit.
    """
    config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    tokens, ranks = vllm_config.model_config.max_model_len, vllm_config.parallel_config.tensor_parallel_size
    layers = sum(layer is not None for layer in paged_layers(config, ranks))
    pages = common_pages(config, tokens, dtype, ranks, linear_state(vllm_config.cache_config))
    request_bytes = layers * pages.size_bytes * pages.after(1)
    usable = (
        device_bytes * vllm_config.cache_config.gpu_memory_utilization - weight_bytes(vllm_config.model_config) / ranks
    )
    fit = int(usable * PAGES_SHARE / request_bytes)
    if fit < 1:
        raise ConfigError(
            f"a request needs {request_bytes / 2**20:,.0f} MiB of states from its first token on, which do not fit into the GPU beside "
            "the weights. Give a larger --tensor-parallel-size."
        )
    scheduler = vllm_config.scheduler_config
    if fit < scheduler.max_num_seqs:
        _log().info(
            f"at most {fit} requests at the same time, not {scheduler.max_num_seqs}: each needs {request_bytes / 2**20:,.0f} MiB "
            "of states from its first token on."
        )
        scheduler.max_num_seqs = fit


def weight_bytes(model_config: Any) -> int:
    """Bytes of a model's weights: the files of a quantized checkpoint, at most a byte per weight if vLLM quantizes."""
    config = model_config.hf_config
    with torch.device("meta"):
        count = sum(x.numel() for x in family_of(config.model_type).still_model(config).parameters())
    whole: int = count * model_config.dtype.itemsize
    if model_config.quantization is None:
        return whole
    files = sum(file.stat().st_size for file in Path(model_config.model).glob("*.safetensors"))
    return min(whole, files if files and getattr(config, "quantization_config", None) else count)


def context_length(config: Any, tokens: int, requested: bool) -> int:
    """Most tokens of a request: `tokens`, limited to the capacity unless the user `requested` them.

    Raises:
        ConfigError: The user requested more than the capacity.
    """
    deployment = config.still.deployment
    capacity = deployment.capacity(config)
    if not deployment.bounded or tokens <= capacity:
        return tokens
    if requested:
        raise ConfigError(
            f"--max-model-len {tokens} exceeds capacity_tokens={capacity} of this STILL model. Ask for at most {capacity}, or make the "
            "folder again with a larger --capacity-tokens."
        )
    return int(capacity)


def check_device(config: Any, dtype: torch.dtype, device: str, capability: int | None, ranks: int) -> None:
    """Raise UnsupportedError if the device has no kernels, UnsupportedModelError if they do not cover a layer.

    Args:
        device: "cpu", "cuda" or another of vLLM's.
        capability: Compute capability of a GPU, 90 for sm_90.
    """
    layers = [layer for layer in paged_layers(config, ranks) if layer is not None]
    if device == "cpu":
        return
    if device != "cuda" or (capability or 0) < LEAST_CAPABILITY:
        name = device if capability is None else f"sm_{capability}"
        raise UnsupportedError(
            f"{name} has no kernels of STILL; known: cpu (PyTorch) and CUDA from sm_{LEAST_CAPABILITY} on. Serve on one of these."
        )
    for layer in layers:
        reasons = layer.refusals(dtype)
        if reasons:
            raise UnsupportedModelError(
                f"no GPU kernel covers this model: {' '.join(reasons)} Serve it on the CPU, or linearize with sizes that are covered."
            )


def find_quantized(quantization: Any, stored: Mapping[str, Any] | None) -> None:
    """Let vLLM quantize projections of attention where it infers the quantized modules.

    If an AWQ checkpoint does not list its unquantized modules, vLLM assumes every module with a plain weight is one, and all modules whose
    names contain its name. Attention has plain weights by head next to its projections.

    Args:
        quantization: vLLM's configuration; its list of unquantized modules is changed.
        stored: quantization_config of the checkpoint.
    """
    found = getattr(quantization, "modules_to_not_convert", None)
    if found and not (stored or {}).get("modules_to_not_convert"):
        quantization.modules_to_not_convert = [name for name in found if not name.endswith(".self_attn")]


def keep_experts(quantization: Any) -> None:
    """Leave stacked experts unquantized. Tools that quantize linear layers skip them without listing them.

    Args:
        quantization: vLLM's configuration, which then has no method for them.
    """
    method = quantization.get_quant_method
    quantization.get_quant_method = lambda layer, prefix: None if ".mlp.experts" in prefix else method(layer, prefix)


def _log() -> logging.Logger:
    from vllm.logger import init_logger

    logger: logging.Logger = init_logger("vllm.still_export")  # below vLLM's logger, so that its handler applies
    return logger
