"""Sizes of published models, as Hugging Face configurations name them: for models with weights of no meaning."""

from __future__ import annotations

from typing import Any

SMOLLM2, LLAMA_8B = "smollm2-135m", "llama-8b"

GEOMETRIES: dict[str, dict[str, Any]] = {
    SMOLLM2: dict(
        model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=49_152, max_position_embeddings=131_072, tie_word_embeddings=True,
    ),
    "llama-1b": dict(  # TinyLlama-1.1B's
        model_type="llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, head_dim=64, vocab_size=32_000, max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    LLAMA_8B: dict(  # Llama-3.1-8B's
        model_type="llama", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128_256, max_position_embeddings=131_072, rope_theta=500_000.0,
        tie_word_embeddings=False,
    ),
    "qwen2.5-1.5b": dict(  # Qwen2.5-Coder-1.5B's
        model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151_936, max_position_embeddings=32_768, rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    "qwen3.5-0.8b": dict(  # the text of Qwen3.5-0.8B
        model_type="qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, vocab_size=248_320, max_position_embeddings=262_144, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def config_of(geometry: str, **changed: Any) -> Any:
    """transformers' configuration of a geometry, with other sizes where they are given."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**GEOMETRIES[geometry], **changed})
