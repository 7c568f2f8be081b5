"""Small random Qwen3.5 models that see images, as transformers saves them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE = 290
VOCAB, CHANNELS, PATCH_VALUES = 300, 64, 96


@torch.no_grad()
def vision_model(experts: bool = False, seed: int = 0) -> Any:
    """With four layers of text and two of images; positions of three rows differ in their shares of a head."""
    torch.manual_seed(seed)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[3, 3, 2])
    text = dict(
        vocab_size=VOCAB, hidden_size=CHANNELS, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=4096, rope_parameters=rope,
    )  # fmt: skip
    if experts:
        text |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    sight = dict(
        depth=2, hidden_size=48, intermediate_size=80, num_heads=3, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
        out_hidden_size=CHANNELS, num_position_embeddings=36,
    )  # fmt: skip
    config = AutoConfig.for_model(
        "qwen3_5_moe" if experts else "qwen3_5",
        text_config=text,
        vision_config=sight,
        image_token_id=IMAGE,
        video_token_id=291,
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"  # the others take no float64
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.3))
    return model
