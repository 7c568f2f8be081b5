"""Random models of every family whose dimensions all differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from still_export.mixers.cache import StillCache
from still_export.mixers.config import StillConfig
from still_export.models import FAMILIES, attach_untrained

SHARED = Path(__file__).parents[3] / "shared"
STORIES = SHARED / "models" / "stories260K"
GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
VOCAB = 61
CHUNK = 8
DENSE = tuple(name for name in FAMILIES if name not in ("qwen3_moe", "phi3", "gemma3_text"))
"""Families without experts and windows, which every target takes; Phi-3 is Llama by then."""
MIXED = ("hybrid_attention", "full_attention", "hybrid_attention")

needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is absent on this machine")


def family_config(family: str, **changes: Any) -> Any:
    """A plain configuration: 3 layers, 6 query and 2 key heads; D = 10 where the family has its own head_dim, else 4."""
    values: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family not in ("qwen2", "smollm3"):
        values["head_dim"] = 10
    if family == "mistral":
        values["sliding_window"] = None
    if family == "qwen3_moe":
        values |= dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14)
    if family == "phi3":
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6}
    if family == "gemma3_text":
        layers = ["full_attention", "sliding_attention", "full_attention"]
        values |= dict(layer_types=layers, sliding_window=9, query_pre_attn_scalar=10, final_logit_softcapping=2.0)
    if family == "smollm3":
        values["no_rope_layers"] = [1, 0, 1][: changes.get("num_hidden_layers", 3)]
    return FAMILIES[family].config(**{**values, **changes})


def plain_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """A plain softmax model with every parameter random, biases and norms included."""
    model = AutoModelForCausalLM.from_config(family_config(family, **changes)).to(dtype).eval()
    model.config._experts_implementation = "eager"  # the others want sizes that are multiples
    model.generation_config.eos_token_id = None  # random models must not stop by chance
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def still_model(
    family: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sizes: dict[str, int] | None = None,
    **still: Any,
) -> Any:
    """A STILL model with every parameter random, feature maps and gates included; `sizes` change the plain configuration."""
    config = StillConfig.from_dict({"chunk_size": CHUNK, "salient_per_chunk": 3, **still})
    model = attach_untrained(plain_model(family, dtype, seed, **(sizes or {})), config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "g_proj" in name or "feature_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def random_ids(rows: int, tokens: int, seed: int = 5) -> Tensor:
    """Token ids without the special ones, [rows, tokens]."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of unequal length as a right-padded batch and its mask."""
    width = columns or max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask


def behind_padding(
    model: Any, ids: Tensor, expected: Tensor, lengths: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each of two rows the logits of three tokens behind `lengths`, read side by side with junk in the padding, and those expected."""
    rows, mask = padded([row[:length] for row, length in zip(ids, lengths, strict=True)])
    rows[mask == 0] = 7  # what stands in the padding enters nothing
    cache = StillCache.empty(model.config)
    model(rows, attention_mask=mask, past_key_values=cache)
    after = torch.stack([row[length : length + 3] for row, length in zip(ids, lengths, strict=True)])
    found = model(after, past_key_values=cache).logits
    for row, length in enumerate(lengths):
        yield found[row], expected[row, length : length + 3]
