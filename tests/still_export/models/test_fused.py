"""LoRA pairs of projections that a checkpoint holds as one."""

from types import SimpleNamespace

import pytest
import torch

from still_export.errors import CheckpointError
from still_export.models.families.fused import split_linear_layers
from still_export.models.read.convert import merge_lora
from still_export.models.read.weights import value_of

CONFIG = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, head_dim=5, hidden_size=14, intermediate_size=11)
ROWS = {"self_attn.q": 30, "self_attn.k": 10, "self_attn.v": 10, "mlp.gate": 11, "mlp.up": 11}
ADAPTER = {"lora_alpha": 6, "r": 3}


def pair(part: str, rows: int) -> dict[str, torch.Tensor]:
    module = f"model.layers.0.{part}_proj"
    return {f"{module}.lora_A.weight": torch.randn(3, 14), f"{module}.lora_B.weight": torch.randn(rows, 3)}


@pytest.mark.parametrize("parts", [[part] for part in ROWS] + [list(ROWS)], ids=str)
def test_pairs_of_parts_are_merged_as_if_each_lay_alone(parts: list[str]) -> None:
    torch.manual_seed(len(parts))
    alone = {f"model.layers.0.{part}_proj.weight": torch.randn(rows, 14) for part, rows in ROWS.items()}
    q, k, v, gate, up = alone.values()
    pairs: dict[str, torch.Tensor] = {}
    fused = {
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat([gate, up]),
    }
    for part in parts:
        pairs |= pair(part, ROWS[part])
    found = split_linear_layers(merge_lora({**fused, **pairs}, ADAPTER, "adapter"), CONFIG, ())
    expected = merge_lora({**alone, **pairs}, ADAPTER, "adapter")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(value_of(found[name]), value_of(weight), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("part", "rows"), [("self_attn.q", 50), ("self_attn.q", 29), ("self_attn.v", 25), ("mlp.up", 10)]
)
def test_pairs_without_a_place_are_refused(part: str, rows: int) -> None:
    weights = {
        "model.layers.0.self_attn.qkv_proj.weight": torch.randn(50, 14),
        "model.layers.0.mlp.gate_up_proj.weight": torch.randn(22, 14),
    }
    with pytest.raises(CheckpointError, match=f"{part}_proj fits no weight of the model"):
        merge_lora({**weights, **pair(part, rows)}, ADAPTER, "adapter")
