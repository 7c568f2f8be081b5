"""What STILL models require of vLLM's configuration, and what they refuse at startup, one sentence each. No vLLM at import."""

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
"""Share of a GPU's memory besides weights for pages; the rest is for activations and CUDA graphs."""
LEAST_CAPABILITY = 80
"""Compute capability of the oldest GPU with kernels."""

EXPERTS = ("qwen3_moe",)
"""Families with experts whose vLLM model can use our attention."""


class ServedConfig:
    """vLLM's hooks, called before a model is created; by architecture in its MODELS_CONFIG_MAP."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Limit the context to the capacity of the states, and declare which layers have states.

        Raises:
            ConfigError: --max-model-len exceeds the capacity.
            UnsupportedModelError: It has experts of a kind that is not served; or see `paged_layers`.
        """
        config = model_config.hf_config
        family = config.model_type.removeprefix("still_")
        counts = (getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        if any(counts) and family not in EXPERTS:
            raise UnsupportedModelError(
                f"model_type={family}: of models with experts this plugin serves {', '.join(EXPERTS)}. Export it with --to onnx."
            )
        layers = paged_layers(config)
        # vLLM counts layers by kind here.
        config.layers_block_type = ["attention" if layer is None else "mamba" for layer in layers]
        asked = model_config.original_max_model_len
        model_config.max_model_len = context_length(config, model_config.max_model_len, asked not in (None, -1))

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse unsupported settings, disable prefix caching, and limit concurrent requests on a GPU.

        Raises:
            ConfigError, UnsupportedError, UnsupportedModelError: One sentence each.
        """
        from vllm.platforms import current_platform

        if vllm_config.speculative_config is not None:
            raise ConfigError(
                "speculative decoding needs states that forget rejected tokens; those of a STILL model cannot. Leave out "
                "--speculative-config."
            )
        cache = vllm_config.cache_config
        if cache.enable_prefix_caching and cache.mamba_block_size is not None:
            vllm_config.model_config.hf_config.prefix_tokens = cache.mamba_block_size  # where vLLM keeps the choice
            vllm_config.scheduler_config.scheduler_cls = f"{__package__}.scheduler.prefix_scheduler"
        elif cache.enable_prefix_caching:
            # vLLM's default for stateful models; whether the user set it is not visible here.
            _log().warning(
                "prefix caching is switched off: kept states need much memory. --mamba-block-size 2048, beside --enable-prefix-caching, "
                "keeps those after every 2,048 tokens; --no-enable-prefix-caching leaves out this line."
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
    """Lower --max-num-seqs to the number of requests whose first pages fit on a GPU, and log it.

    More never run at the same time; and vLLM, to measure its CUDA graphs, takes a page for each request that is allowed before it knows
    how much memory is left.

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
            f"a request holds {request_bytes / 2**20:,.0f} MiB of states from its first token on, for which the GPU has no room beside "
            "the weights. Give a larger --tensor-parallel-size."
        )
    scheduler = vllm_config.scheduler_config
    if fit < scheduler.max_num_seqs:
        _log().info(
            f"at most {fit} requests at the same time, not {scheduler.max_num_seqs}: each has {request_bytes / 2**20:,.0f} MiB "
            "of states from its first token on."
        )
        scheduler.max_num_seqs = fit


def weight_bytes(model_config: Any) -> int:
    """Bytes of a model's weights: of a quantized checkpoint's files; at most a byte each if vLLM quantizes them."""
    config = model_config.hf_config
    with torch.device("meta"):
        count = sum(x.numel() for x in family_of(config.model_type).still_model(config).parameters())
    whole: int = count * model_config.dtype.itemsize
    if model_config.quantization is None:
        return whole
    files = sum(file.stat().st_size for file in Path(model_config.model).glob("*.safetensors"))
    return min(whole, files if files and getattr(config, "quantization_config", None) else count)


def context_length(config: Any, tokens: int, asked: bool) -> int:
    """Most tokens of a request: `tokens`, or without `asked` at most the capacity.

    Raises:
        ConfigError: Somebody asked for more than the capacity.
    """
    deployment = config.still.deployment
    capacity = deployment.capacity(config)
    if not deployment.bounded or tokens <= capacity:
        return tokens
    if asked:
        raise ConfigError(
            f"--max-model-len {tokens} exceeds capacity_tokens={capacity} of this STILL model. Ask for at most {capacity}, or make the "
            "folder again with a larger --capacity-tokens."
        )
    return int(capacity)


def check_device(config: Any, dtype: torch.dtype, device: str, capability: int | None, ranks: int) -> None:
    """Raise UnsupportedError if a device has no kernels, UnsupportedModelError if they do not cover a layer.

    Args:
        device: "cpu", "cuda" or another of vLLM's.
        capability: Of a GPU, 90 for sm_90.
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


def find_quantized(quantization: Any, said: Mapping[str, Any] | None) -> None:
    """Let attention's projections be quantized where vLLM detects quantized modules itself.

    Of an AWQ checkpoint that does not say what it left alone, vLLM takes each module with a plain weight for such a one, and whatever has
    its name in its own. Attention has weights by head beside its projections.

    Args:
        quantization: vLLM's, of which its list is changed.
    """
    found = getattr(quantization, "modules_to_not_convert", None)
    if found and not (said or {}).get("modules_to_not_convert"):
        quantization.modules_to_not_convert = [name for name in found if not name.endswith(".self_attn")]


def keep_experts(quantization: Any) -> None:
    """Leave stacked experts unquantized: tools that quantize linear layers skip them without declaring it.

    Args:
        quantization: vLLM's, which then has no method for them.
    """
    method = quantization.get_quant_method
    quantization.get_quant_method = lambda layer, prefix: None if ".mlp.experts" in prefix else method(layer, prefix)


def _log() -> logging.Logger:
    from vllm.logger import init_logger

    logger: logging.Logger = init_logger("vllm.still_export")  # below vLLM's logger, to use its handler
    return logger
