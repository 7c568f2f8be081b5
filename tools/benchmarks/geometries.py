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
    "qwen3.5-2b": dict(  # the text of Qwen3.5-2B
        model_type="qwen3_5_text", hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, vocab_size=248_320, max_position_embeddings=262_144, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
    ),
    "qwen3.5-35b-a3b": dict(  # the text of Qwen3.5-35B-A3B
        model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, vocab_size=248_320, max_position_embeddings=262_144, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, tie_word_embeddings=False,
    ),
    "granite-4-h-tiny": dict(
        model_type="granitemoehybrid", hidden_size=1536, num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=100_352, max_position_embeddings=131_072, position_embedding_type="nope", num_local_experts=64,
        num_experts_per_tok=6, intermediate_size=512, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, embedding_multiplier=12.0, logits_scaling=6.0,
        attention_multiplier=0.0078125, residual_multiplier=0.22, tie_word_embeddings=True, rms_norm_eps=1e-5,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    ),
    "granite-4-h-1b": dict(
        model_type="granitemoehybrid", hidden_size=1536, num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=100_352, max_position_embeddings=131_072, position_embedding_type="nope", num_local_experts=0,
        num_experts_per_tok=0, intermediate_size=4096, shared_intermediate_size=4096, mamba_n_heads=48, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, embedding_multiplier=12.0, logits_scaling=6.0,
        attention_multiplier=0.0078125, residual_multiplier=0.22, tie_word_embeddings=True, rms_norm_eps=1e-5,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    ),
    "granite-4-h-16-experts": dict(  # Granite-4.0-H-Tiny's with 16 of its 64 experts, for machines of little memory
        model_type="granitemoehybrid", hidden_size=1536, num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=100_352, max_position_embeddings=131_072, position_embedding_type="nope", num_local_experts=16,
        num_experts_per_tok=6, intermediate_size=512, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, embedding_multiplier=12.0, logits_scaling=6.0,
        attention_multiplier=0.0078125, residual_multiplier=0.22, tie_word_embeddings=True, rms_norm_eps=1e-5,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    ),
    "lfm2-1.2b": dict(
        model_type="lfm2", hidden_size=2048, intermediate_size=12_288, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=65_536, max_position_embeddings=128_000, rope_theta=1_000_000.0,
        tie_word_embeddings=True, conv_L_cache=3, conv_bias=False, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    ),
}  # fmt: skip


def config_of(geometry: str, **changed: Any) -> Any:
    """transformers' configuration of a geometry, with other sizes where they are given."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**GEOMETRIES[geometry], **changed})
