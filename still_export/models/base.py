"""What every STILL model adds to its family: configuration, replaced attention modules, forward, generate."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from still_export.errors import CapacityError, ConfigError, PaddingError, UnsupportedError
from still_export.mixers.cache import StillCache, hear_cache
from still_export.mixers.cache_layer import CACHE, Progress
from still_export.mixers.config import LayersConfig, StillConfig
from still_export.mixers.experts.module import swap_experts
from still_export.mixers.layers import HYBRID, head_size
from still_export.mixers.projections import Carried, ProjectedAttention
from still_export.mixers.registry import MIXERS, mixer_of
from still_export.models.families.support import check_attention, check_family_config, with_windows


class StillConfigMixin:
    """A family configuration with `still_config`, a plain dict in config.json; `still` is its typed form."""

    still_config: dict[str, Any] | None
    stored: ClassVar[type[LayersConfig]] = StillConfig

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        still = self.read_still()
        self.still_config = still.to_dict()
        self.check(still)
        kinds = set(still.layer_types or (HYBRID,))
        if still.deployment.whole_prompts and not any(MIXERS[kind].by_prompts for kind in kinds):
            raise ConfigError(
                f"whole_prompts: no layer goes by a prompt's length ({', '.join(sorted(kinds))}). Leave out --whole-prompts."
            )

    @property
    def feeding(self) -> dict[str, Any]:
        """How prompts are fed (see the manifest); {}: in any pieces."""
        return {"whole_prompts": True} if self.still.deployment.whole_prompts else {}

    def read_still(self) -> LayersConfig:
        """The STILL configuration stored in the family's; layers with a window of the family's keep it."""
        return with_windows(self, self.still)

    def check(self, still: LayersConfig) -> None:
        """Raise UnsupportedModelError if the family's configuration has layers that are not covered."""
        check_family_config(self, still)

    @property
    def still(self) -> Any:
        """The STILL configuration, typed as `stored`."""
        return self.stored.from_dict(self.still_config or {})


class StillModelMixin:
    """Mixed in before a family's `...ForCausalLM`: hybrid layers, tensor-only cache, batches padded on either side."""

    config: Any
    model: Any
    lm_head: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.swap_mixers()

    def swap_mixers(self) -> None:
        """Replace every layer's attention module by its mixer's, in place.

        Raises:
            UnsupportedModelError: A module has parts that the mixer has no place for.
            ConfigError: The STILL configuration does not fit the model.
        """
        config = self.config
        config.still.check_layers(config.num_hidden_layers)
        self.carried = Carried()
        for index, layer in enumerate(self.model.layers):
            check_attention(layer.self_attn, f"layers.{index}.self_attn", head_size(config))
            layer.self_attn = hear_cache(mixer_of(config, index).module(layer.self_attn, config, index))
            swap_experts(layer, self.config)
            layer.self_attn._carried = self.carried

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ProjectedAttention) and module.fresh:
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StillCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: StillCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Like the family, with these differences.

        Args:
            attention_mask: [B, T] or [B, past columns + T]; 1 at tokens, 0 at padding on the left or right of them.
            position_ids: Must be those that follow from the cache: each sequence continues at its own length.
            past_key_values: A StillCache; None with use_cache starts one. transformers 5.24 calls it `cache`.
            logits_to_keep: n keeps the last n tokens *of each sequence*, so that `logits[:, -1]` continues right-padded sequences too.

        Raises:
            PaddingError: The mask has padding between tokens, or contradicts the cache.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise UnsupportedError("pass exactly one of input_ids and inputs_embeds.")
        batch, tokens = inputs.shape[:2]
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, StillCache):
            raise UnsupportedError(
                f"past_key_values is a {type(cache).__name__}; a STILL model keeps its state in StillCache.empty(model.config)."
            )
        caching = self.config.use_cache and not self.training if use_cache is None else use_cache  # type: ignore[attr-defined]
        if cache is None and caching:
            cache = StillCache.empty(self.config)
        progress = Progress() if cache is None else cache.progress
        length = progress.start(batch, inputs.device)
        if attention_mask is None:
            new_tokens, columns = progress.every(tokens), None
        else:
            new_tokens, columns = new_tokens_of_mask(attention_mask, batch, tokens, length)
        if columns is not None:  # chunks are counted from a sequence's first token: padding moves to the right
            input_ids, inputs_embeds, position_ids = (
                None if each is None else _columns(each, columns) for each in (input_ids, inputs_embeds, position_ids)
            )
        positions = length[:, None]
        if tokens != 1:
            positions = positions + torch.arange(tokens, device=inputs.device)
        if position_ids is not None:
            real = torch.arange(tokens, device=inputs.device) < new_tokens[:, None]
            if not bool(((position_ids == positions) | ~real).all()):
                raise PaddingError(
                    "position_ids differ from the sequences' own positions; leave them out: each sequence continues at its length."
                )
        progress.begin(new_tokens, tokens)
        outputs = self.decode(positions, cache, input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        progress.advance()
        hidden, states = outputs.last_hidden_state, outputs.hidden_states
        if columns is not None:
            inverse = columns.argsort(1)
            states = None if states is None else tuple(_columns(state, inverse) for state in states)
            if isinstance(logits_to_keep, Tensor) or logits_to_keep == 0:
                hidden = _columns(hidden, inverse)
        if (
            tokens != 1 or isinstance(logits_to_keep, Tensor) or logits_to_keep > 1
        ):  # else the only token is the last one
            hidden = last_rows(hidden, new_tokens, logits_to_keep)
        logits = self.logits(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(  # type: ignore[attr-defined]
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=states,
            attentions=outputs.attentions,
            **{CACHE: cache},
        )

    def decode(self, positions: Tensor, cache: StillCache | None, **kwargs: Any) -> Any:
        """Run the family's base model on `input_ids` or `inputs_embeds` at `positions` [B, T]; `cache` already counts these tokens."""
        return self.model(
            attention_mask=no_mask(self.config, self.model.embed_tokens.weight),
            position_ids=positions,
            use_cache=cache is not None,
            **{CACHE: cache},
            **kwargs,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the base model's last hidden states."""
        return self.lm_head(hidden)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Like transformers; prompts of a batch may be padded on either side, and the cache is a StillCache.

        `cache_implementation="static"` makes it one of fixed size, with which transformers compiles decode steps on a GPU.

        Raises:
            CapacityError: A static cache has no room for so many tokens.
            UnsupportedError: The model needs special tokens inserted between those of the prompt.
        """
        if inserted := getattr(self.config, "feeding", {}).get("inserted"):
            raise UnsupportedError(
                f"generate() puts no token {inserted['id']} behind every {inserted['every']}, which this model wants. Export it: "
                "`still-export run` does."
            )
        generation = kwargs.get("generation_config") or self.generation_config  # type: ignore[attr-defined]
        mask = kwargs.get("attention_mask")
        if (
            kwargs.get("prefill_chunk_size", generation.prefill_chunk_size)
            and mask is not None
            and bool((mask == 0).any())
        ):
            raise PaddingError(
                "prefill_chunk_size with a padded batch: transformers takes all logits from the last chunk, which short sequences do "
                "not reach. Leave it out; long calls are cut inside the attention anyway."
            )
        with _without_left_padding_advice():
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        """transformers' hook of `generate` that adds a cache to the model's arguments."""
        cache = model_kwargs.get(CACHE)
        if cache is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = self._new_cache(generation_config, batch_size, max_cache_length)
            return None
        if isinstance(cache, StillCache) and cache.capacity is not None and max_cache_length > cache.capacity:
            raise CapacityError(
                f"the static cache has room for {cache.capacity} columns and {max_cache_length} are asked for. Make a larger one, or "
                "generate fewer tokens."
            )
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _new_cache(self, generation: Any, batch: int, tokens: int) -> StillCache:
        """The cache for a call of `generate` with `batch` prompts."""
        kind = generation.cache_implementation
        if kind in (None, "dynamic"):
            return StillCache.empty(self.config)
        if kind != "static":
            raise UnsupportedError(f'cache_implementation={kind!r}: a STILL model has "dynamic" and "static".')
        if generation.prefill_chunk_size:
            raise UnsupportedError(
                "prefill_chunk_size with a static cache would compile the prompt too; leave it out: long calls are cut inside the "
                "attention anyway."
            )
        # Never smaller than before, as in transformers: compiled steps would be compiled again.
        tokens = max(tokens, generation.max_cache_len or 0, getattr(self, "_most_cached", 0))
        sequences = batch * max(generation.num_beams, generation.num_return_sequences)
        cache = StillCache.static(self.config, sequences, tokens, self.dtype, self.device)  # type: ignore[attr-defined]
        self._most_cached = tokens
        return cache

    @staticmethod
    def create_masks_for_generate(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Returns the mask unchanged: transformers would expand it to the whole static cache, but the cache knows sequence lengths."""
        return attention_mask

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Drops position_ids (transformers continues after the padding, the cache after the tokens) and a decode step's mask: each
        sequence has one new token, and reading the mask would synchronize with the GPU."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        inputs.pop("position_ids", None)
        ids, first = inputs.get("input_ids"), kwargs.get("is_first_iteration", False)
        if not first and ids is not None and ids.shape[1] == 1 and inputs.get(CACHE) is not None:
            inputs.pop("attention_mask", None)
        return inputs


@contextlib.contextmanager
def _without_left_padding_advice() -> Iterator[None]:
    """Silence transformers' advice to pad on the left: STILL models give the same tokens for either side."""
    logger = logging.getLogger("transformers.generation.utils")

    def keep(record: logging.LogRecord) -> bool:
        return "right-padding was detected" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def new_tokens_of_mask(mask: Tensor, batch: int, tokens: int, length: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns (number of new tokens of each sequence, int64 [B]; columns [B, T] that put tokens before padding, None: they are so already).

    Args:
        mask: [B, S] with S >= T: the last T columns are this call's, earlier ones are those of the cache.
        length: Number of tokens in the cache, [B].

    Raises:
        PaddingError: Padding lies between tokens, or the mask's past contradicts `length`.
    """
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < tokens:
        raise PaddingError(
            f"attention_mask has shape {list(mask.shape)}; expected [{batch}, {tokens}], or [{batch}, past columns + {tokens}]."
        )
    present = mask[:, mask.shape[1] - tokens :].to(length.device) != 0
    new_tokens = present.sum(1)
    order = torch.arange(tokens, device=length.device)
    columns = None
    if not bool((present == (order < new_tokens[:, None])).all()):
        first = present.int().argmax(1)
        columns = (order + first[:, None]) % tokens
        if not bool((present.gather(1, columns) == (order < new_tokens[:, None])).all()):
            raise PaddingError("attention_mask has zeros between tokens; pad sequences on the left or on the right.")
    seen = (mask[:, : mask.shape[1] - tokens] != 0).sum(1).to(length.device)
    if mask.shape[1] > tokens and not bool((seen == length).all()):
        raise PaddingError(
            f"attention_mask says that the sequences have seen {seen.tolist()} tokens and the cache says {length.tolist()}; "
            "pass the mask of all columns so far, or of the new ones only."
        )
    return new_tokens, columns


def _columns(x: Tensor, columns: Tensor) -> Tensor:
    """`x` [B, T, ...] with columns permuted by `columns` [B, T]; B = 1 is broadcast."""
    x = x.expand(len(columns), *x.shape[1:])
    return x.gather(1, columns.reshape(*columns.shape, *[1] * (x.dim() - 2)).expand(*columns.shape, *x.shape[2:]))


def last_rows(hidden: Tensor, new_tokens: Tensor, keep: int | Tensor) -> Tensor:
    """The last `keep` tokens of each sequence of `hidden` [B, T, channels]; 0 keeps all, a tensor of columns keeps those.

    A sequence with fewer tokens repeats its first one in front.
    """
    if isinstance(keep, Tensor):
        return hidden[:, keep]
    if keep == 0:
        return hidden
    # A product, because TensorRT 8.6 cannot negate integers; a scalar, which ONNX Runtime computes on the CPU.
    index = (new_tokens[:, None] + torch.arange(keep * -1, 0, device=hidden.device)).clamp_min(0)  # [B, keep]
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[2]))


def first_names(model: nn.Module) -> dict[str, str]:
    """Of each parameter by each of its names the first one: modules that layers share have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in model.named_parameters(remove_duplicate=False)}


def no_mask(config: Any, like: Tensor) -> Tensor | dict[str, Tensor]:
    """A placeholder mask, so that the family's base model makes none: attention modules know the sequence lengths."""
    mask = like.new_zeros(1, 1, 1, 1)
    types = getattr(config, "layer_types", None)
    # Layers of two kinds need masks of both.
    return mask if types is None else dict.fromkeys((*types, "full_attention", "linear_attention"), mask)
