"""StillConfig: validation, JSON, layers."""

import pytest

from still_export.errors import ConfigError
from still_export.mixers.config import DEPLOYMENT, StillConfig
from still_export.mixers.layers import Deployment
from tests.still_export.tiny import family_config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chunk_sise": 3}, "chunk_size"),
        ({"layer_types": ["hybrid"]}, "hybrid_attention"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"salient_per_chunk": 65}, "salient_per_chunk=65"),
        ({"overflow": "fold"}, "overflow='fold'"),
        ({"local": "sliding", "window_size": 65}, "window_size=65"),
    ],
)
def test_bad_values_are_named(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StillConfig.from_dict(values)


def test_layer_config_has_the_familys_geometry() -> None:
    family = family_config("qwen2")
    config = StillConfig(window_factors=[[0.5] * 6, [0.25] * 6, [1.0] * 6])
    layer = config.layer_config(family, 1, config.deployment)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (6, 2, 4)
    assert layer.window_factor == (0.25,) * 6
    assert layer.capacity_tokens == 256
    with pytest.raises(ConfigError, match="window_factors has 1 entries"):
        StillConfig(window_factors=[[0.5] * 6]).layer_config(family, 0, Deployment())


def test_settings_are_stored_where_a_layer_has_them() -> None:
    mixed = StillConfig(layer_types=["full_attention", "hybrid_attention"])
    stored = set(DEPLOYMENT) - {"whole_prompts"}  # written where it is chosen
    assert {"chunk_size", "layer_types", *stored} <= set(mixed.to_dict()) == set(StillConfig().to_dict())
    other = StillConfig(layer_types=["liger_gla"], deployment=Deployment(cache="float16"))
    assert set(other.to_dict()) == {"layer_types", *stored}
    assert StillConfig.from_dict(other.to_dict()) == other
