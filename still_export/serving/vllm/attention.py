"""A family's attention in vLLM: projections are vLLM's parallel layers, mixing is done by our kernels or by vLLM's attention."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from still_export.mixers.cache_type import rounded
from still_export.mixers.paged import PagedLayer, PagedTokens
from still_export.mixers.projections import rotate
from still_export.mixers.registry import mixer_of
from still_export.serving.vllm import OP
from still_export.serving.vllm.blocks import StatesSpec
from still_export.serving.vllm.pages import linear_state
from still_export.serving.vllm.parts import rounded_up
from still_kernels.packing import Packing, PagedStates


class ServedAttention(nn.Module):
    """The attention of one layer; its parameters are named as in a STILL folder.

    Args:
        like: The same module in transformers, which shows the parts: biases, norms of queries and keys, positions.
        prefix: The module's name, with the layer's number.

    The other arguments are those that vLLM's decoder layer passes.
    """

    def __init__(
        self,
        like: Any,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int,
        quant_config: Any = None,
        cache_config: Any = None,
        prefix: str = "",
        **_: Any,
    ) -> None:
        super().__init__()
        index = extract_layer_index(prefix)
        base = like[index].self_attn
        self.head_dim = dim = base.head_dim
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.heads, self.kv_heads = num_heads // ranks, max(1, num_kv_heads // ranks)
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            dim,
            num_heads,
            num_kv_heads,
            bias=base.q_proj.bias is not None,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * dim,
            hidden_size,
            bias=base.o_proj.bias is not None,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = self.k_norm = None
        if base.q_norm is not None:
            self.q_norm, self.k_norm = (RMSNorm(dim, eps=config.rms_norm_eps) for _ in range(2))
        self.rotary_emb = None
        if base.use_rope:
            self.rotary_emb = get_rope(dim, max_position_embeddings, rope_parameters=config.rope_parameters)
        self.cache = config.still.deployment.cache
        self.layer = layer = mixer_of(config, index).paged(config, index, ranks, rank)

        def softmax(name: str, window: int | None = None) -> Attention:
            return Attention(
                self.heads,
                dim,
                dim**-0.5,
                num_kv_heads=self.kv_heads,
                cache_config=cache_config,
                quant_config=quant_config,
                per_layer_sliding_window=window,
                prefix=f"{prefix}.{name}",
            )

        self.window = None
        if layer is None:
            self.attn: nn.Module = softmax("attn")
            return
        if layer.window:
            self.window = softmax("window", layer.window)
        self.projections = tuple(layer.projections)
        for name, of in layer.projections.items():
            channels, place = of.low_rank or hidden_size, f"{prefix}.{name}"
            last = f"{place}.1" if of.low_rank else place
            parts: list[nn.Module] = [
                ColumnParallelLinear(
                    channels, num_heads * of.size, bias=of.bias, quant_config=quant_config, prefix=last
                )
            ]
            if of.low_rank:
                first = ReplicatedLinear(
                    hidden_size, channels, bias=False, quant_config=quant_config, prefix=f"{place}.0"
                )
                parts.insert(0, first)
            self.add_module(name, nn.ModuleList(parts) if of.low_rank else parts[0])
        for name, (count, *rest) in layer.head_weights.items():
            parameter = nn.Parameter(torch.empty(count if count == 1 else count // ranks, *rest), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": load_heads})
            self.register_parameter(name, parameter)
        self.attn = PagedMixer(layer, self, config, f"{prefix}.attn")

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Hidden states [tokens, channels] at `positions` [tokens]."""
        dim = self.head_dim
        qkv, _ = self.qkv_proj(hidden_states)
        parts = qkv.split([self.heads * dim, self.kv_heads * dim, self.kv_heads * dim], dim=-1)
        query, key, value = (x.unflatten(1, (-1, dim)) for x in parts)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = (
                norm(x.reshape(-1, dim)).view(x.shape) for norm, x in ((self.q_norm, query), (self.k_norm, key))
            )

        def turn(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            if self.rotary_emb is None:
                return query, key
            if query.dtype == hidden_states.dtype:
                turned = self.rotary_emb(positions, *(x.reshape(len(x), -1) for x in (query, key)))
                return turned[0].view(query.shape), turned[1].view(key.shape)
            # In another type the engine would convert the whole table for all tokens of the context.
            cos, sin = self.rotary_emb.cos_sin_cache[positions].chunk(2, dim=-1)
            both = [torch.cat((x, x), -1)[:, None] for x in (cos, sin)]
            return rotate(query, *both), rotate(key, *both)

        if self.layer is None:
            query, key = turn(query, key)
            key, value = rounded(key, self.cache), rounded(value, self.cache)  # vLLM stores them as floats
            mixed = self.attn(*(x.reshape(len(x), -1) for x in (query, key, value)))
        else:
            assert isinstance(self.attn, PagedMixer)
            projected = {name: self.project(name, hidden_states) for name in self.projections}
            packed = PagedTokens((query, key, value), projected, self.attn.weights, turn)
            inputs = self.layer.inputs(packed)
            windowed = None
            if self.window is not None:
                heads = (*turn(query, key), value)
                windowed = self.window(*(x.reshape(len(x), -1) for x in heads)).view(len(query), -1, dim)
            output = self.attn(inputs, value.new_zeros(len(value), self.heads, dim))
            mixed = self.layer.result(output, windowed, packed).flatten(1)
        result: Tensor = self.o_proj(mixed)[0]
        return result

    def project(self, name: str, hidden: Tensor) -> Tensor:
        """Apply the layer's additional projection `name` to hidden states."""
        module = self.get_submodule(name)
        for part in module if isinstance(module, nn.ModuleList) else [module]:
            hidden = part(hidden)[0]
        return hidden


def load_heads(parameter: Tensor, loaded: Tensor) -> None:
    """Load this rank's heads of a weight with one matrix per head, or the single matrix that all share."""
    share = parameter.shape[0]
    if loaded.shape[0] != share:
        loaded = loaded.narrow(0, get_tensor_model_parallel_rank() * share, share)
    assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
    parameter.data.copy_(loaded)


class PagedMixer(nn.Module, MambaBase):  # type: ignore[misc]  # vLLM is untyped
    """Kernels on pages that vLLM allocates.

    Args:
        weights: The module with the layer's weights by head.
        prefix: vLLM's name of the layer.
    """

    def __init__(self, layer: PagedLayer, weights: nn.Module, config: Any, prefix: str) -> None:
        super().__init__()
        self.layer, self.prefix = layer, prefix
        self.weights = {name: weights.get_parameter(name) for name in layer.head_weights}
        current = get_current_vllm_config()
        tokens = current.model_config.max_model_len
        capacity, linear = config.still.deployment.capacity(config), linear_state(current.cache_config)
        self.pages = layer.pages(tokens, capacity, current.model_config.dtype, linear)
        known = current.compilation_config.static_forward_context
        if prefix in known:
            raise ValueError(f"two layers are called {prefix}")
        known[prefix] = self
        self.kv_cache: tuple[Tensor, ...] = ()
        self.tokens, self.rehearsed = tokens, 0
        self.rows = current.scheduler_config.max_num_seqs

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.pages.size_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    def get_kv_cache_spec(self, vllm_config: Any) -> StatesSpec:
        cache, spec = vllm_config.cache_config, super().get_kv_cache_spec(vllm_config)
        if not cache.enable_prefix_caching:
            return StatesSpec.of(spec, self.pages)
        # Prefixes end where blocks of full attention do. The scheduler must hash them as in mode "align". The runner reads another place,
        # in this and its own process, and must not copy states as if each were one block.
        cache.mamba_cache_mode = "none"
        size = cache.block_size
        every = -(-vllm_config.model_config.hf_config.prefix_tokens // size) * size
        return StatesSpec.of(spec, self.pages, block_size=size, mamba_cache_mode="align", every=every)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.CUSTOM

    def forward(self, inputs: dict[str, Tensor], output: Tensor) -> Tensor:
        """Returns `output` [tokens, H, D], initially zeros, computed from the layer's `inputs`; padding tokens stay zero."""
        torch.ops.vllm.still_paged([inputs[name] for name in self.layer.names], output, self.prefix)
        return output

    def run(self, inputs: list[Tensor], output: Tensor) -> None:
        """Run the step's calls, or a rehearsal while vLLM measures its memory."""
        heads = dict(zip(self.layer.names, inputs, strict=True))
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            tokens = min(len(output), self.tokens - 1)
            if output.is_cuda and tokens > self.rehearsed:
                self.rehearse(heads, tokens, output)
            return
        for packing, length in metadata[self.prefix].calls:
            self.layer.attend(heads, self.weights, PagedStates(self.kv_cache[0], length, packing), output)

    def rehearse(self, heads: dict[str, Tensor], tokens: int, output: Tensor) -> None:
        """Run a prompt of `tokens`, a step of one row and one of all, on temporary pages. Kernels are compiled before requests arrive, and
        vLLM's measured peak includes their memory."""
        self.rehearsed = tokens
        pages, device = self.pages, output.device
        memory = torch.zeros(pages.columns, pages.size_bytes, dtype=torch.int8, device=device)
        table = torch.arange(pages.columns, dtype=torch.int32, device=device)[None]
        for rows, count, seen in ((1, tokens, 0), (1, 1, tokens), (min(self.rows, tokens), 1, tokens)):
            start = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=device)
            longest = 1 if count == 1 else rounded_up(count)
            packing = Packing(start, table.repeat(rows, 1), longest, pages)
            length = torch.full((rows,), seen, dtype=torch.int32, device=device)
            packed = {name: x[: rows * count] for name, x in heads.items()}
            self.layer.attend(packed, self.weights, PagedStates(memory, length, packing), output[: rows * count])


def _still_paged(inputs: list[Tensor], output: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].run(inputs, output)


direct_register_custom_op(op_name=OP.removeprefix("vllm::"), op_func=_still_paged, mutates_args=["output"])
