"""Families with experts, and LFM3, at the widths that are published: two to four layers, fewer experts, one of them unused, two tied.

The number of experts is what is smaller: with all of them a layer in float64 takes 6 to 12 GB. MiniMax and Jamba have narrower experts too.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.mixers.experts.module import RoutedExperts
from still_export.models.load import load_model
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, far, ids, pieces
from tests.still_export.targets.portable.test_linear_export import call
from tests.still_export.tiny import behind_padding

_PAIR = ["linear_attention", "full_attention"]
_QWEN: dict[str, Any] = dict(
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, layer_types=_PAIR, num_experts=16,
    moe_intermediate_size=512, shared_expert_intermediate_size=512,
)  # fmt: skip
_LATENT: dict[str, Any] = dict(
    num_attention_heads=32, num_key_value_heads=32, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    layer_types=_PAIR, mlp_layer_types=["dense", "sparse"], num_experts_per_tok=8,
)  # fmt: skip
WIDTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", dict(_QWEN, num_experts_per_tok=8)),
    "Qwen3-Next-80B-A3B": ("qwen3_next", dict(_QWEN, num_experts_per_tok=10)),
    "granite-4.0-h-tiny": (
        "granitemoehybrid",
        dict(
            hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, num_local_experts=16, num_experts_per_tok=6,
            intermediate_size=512, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
            attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, layer_types=_PAIR,
        ),
    ),
    "Kimi-Linear-48B-A3B": (
        "kimi_linear",
        dict(
            _LATENT, hidden_size=2304, intermediate_size=9216, linear_num_heads=32, linear_head_dim=128, num_local_experts=16,
            moe_intermediate_size=1024, n_group=1, topk_group=1, routed_scaling_factor=2.446,
        ),
    ),
    "Ling-3.0-Flash": (
        "bailing_hybrid",
        dict(
            _LATENT, hidden_size=2560, intermediate_size=6144, head_dim=128, num_local_experts=32, moe_intermediate_size=768, n_group=8,
            topk_group=4,
        ),
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h",
        dict(
            hidden_size=2688, num_hidden_layers=None, num_attention_heads=32, num_key_value_heads=2, head_dim=128, mamba_num_heads=64,
            mamba_head_dim=64, ssm_state_size=128, n_groups=8, n_routed_experts=12, num_experts_per_tok=6, moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5, layer_types=["linear_attention", "moe", "full_attention"],
        ),
    ),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        dict(
            hidden_size=2048, intermediate_size=7168, num_attention_heads=32, num_key_value_heads=8, num_dense_layers=1, num_experts=8,
            num_experts_per_tok=4, moe_intermediate_size=1792, layer_types=["conv", "full_attention"],
        ),
    ),
    "LFM3-1.7B": (
        "lfm3",
        dict(
            hidden_size=2048, intermediate_size=7680, num_attention_heads=16, num_key_value_heads=4, head_dim=128, sliding_window=37,
            layer_types=["conv", "sliding_attention", "full_attention"],
        ),
    ),
    "MiniMax-Text-01": (
        "minimax",
        dict(
            hidden_size=6144, intermediate_size=256, num_attention_heads=16, num_key_value_heads=2, head_dim=128, num_local_experts=8,
            num_experts_per_tok=2, layer_types=_PAIR,
        ),
    ),
    "Jamba-1.5-Mini": (
        "jamba",
        dict(
            hidden_size=4096, intermediate_size=512, num_attention_heads=32, num_key_value_heads=8, num_experts=8, num_experts_per_tok=2,
            mamba_d_state=16, mamba_dt_rank=256, mamba_d_conv=4, attn_layer_period=2, attn_layer_offset=1,
        ),
    ),
}  # fmt: skip
"""Published model: its family and sizes. Of LFM3 the window is shorter, so that a short text leaves it; MiniMax' heads are fewer."""
TOKENS, UNUSED, TIED = 48, 5, (0, 1)
"""Experts by number: one that no token chooses; two whose scores and matrices are equal."""


@torch.no_grad()
def wide_model(name: str) -> Any:
    """As transformers has it, in float32, with routers that are not flat."""
    family, sizes = WIDTHS[name]
    model = linear_model(family, **{"num_hidden_layers": len(sizes.get("layer_types", _PAIR)), **sizes})
    model.config._experts_implementation = "eager"
    for block in [x for x in model.modules() if hasattr(x, "experts")]:
        router = block.gate if hasattr(block, "gate") else block.router
        scores = [router.weight, *(x for n, x in block.named_buffers() if n.endswith("_bias"))]
        for tensor in (*scores, *block.experts.parameters()):
            tensor[TIED[1]] = tensor[TIED[0]]
        for bias in scores[1:]:
            bias[UNUSED] = -1.0
        router.register_forward_pre_hook(_turn_away)
    model(ids(tokens=TOKENS), use_cache=False)
    return model


def _turn_away(router: Any, given: tuple[torch.Tensor, ...]) -> None:
    """At its first call: no token chooses UNUSED; they are fewer than channels."""
    seen = given[0].reshape(-1, given[0].shape[-1])
    router.weight[UNUSED] = torch.linalg.lstsq(seen, seen.new_full((len(seen), 1), -40.0)).solution[:, 0]
    router._forward_pre_hooks.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Emptied at once: of these models pytest would keep many gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", WIDTHS)
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str, folder: Path) -> None:
    theirs = wide_model(name)
    theirs.save_pretrained(folder)
    ours, chosen = load_model(folder), list[torch.Tensor]()
    for block in ours.modules():
        if isinstance(block, RoutedExperts):
            block.gate.register_forward_hook(lambda _, given, found: chosen.append(found[0]))
    expected = theirs.double()(ids(tokens=TOKENS), use_cache=False).logits
    assert far(ours(ids(tokens=TOKENS), use_cache=False).logits, expected) <= LOGITS
    for experts in chosen:
        assert not (experts == UNUSED).any() and len(experts.unique()) > experts.shape[-1]
        one, other = ((experts == number).any(-1) for number in TIED)  # of equal scores the lower number
        assert one.any() and not (other & ~one).any()
    assert bool(chosen) == (name != "LFM3-1.7B")
    assert far(pieces(ours, ids(tokens=TOKENS), [20, 1, 27])[0], expected) <= LOGITS
    for found, right in behind_padding(ours, ids(tokens=TOKENS), expected, (17, 9)):
        assert far(found, right) <= LOGITS


@pytest.mark.long
@pytest.mark.parametrize(
    "name, given",
    [
        ("granite-4.0-h-tiny", ("--quantize", "int4")),
        ("Qwen3.5-35B-A3B", ("--quantize", "int4")),
        ("granite-4.0-h-tiny", ("--dtype", "float16")),
        ("Nemotron-3-Nano-30B-A3B", ("--quantize", "int4")),
    ],
    ids=lambda x: x if isinstance(x, str) else x[-1],
)
def test_packages_are_proven(
    name: str, given: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide_model(name).save_pretrained(folder / "model")
    package = folder / "package"
    assert call("export", folder / "model", "-o", package, *given, "--quiet") == 0
    assert call("verify", package, "--lengths", "1,33", "--decode-steps", "2", "--quiet") == 0, capsys.readouterr().out
