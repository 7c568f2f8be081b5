"""GGUF files as other converters write them: what changes no text is left out, scales beside weights count, sampling settings are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from still_export.errors import CheckpointError, UnsupportedModelError  # noqa: E402
from still_export.folders.gguf_description import describe_gguf  # noqa: E402
from still_export.models.load import open_source  # noqa: E402
from still_export.models.read.weights import value_of  # noqa: E402
from tests.still_export.linear_models import linear_model  # noqa: E402
from tests.still_export.models.gguf_files import write_gguf  # noqa: E402
from tests.still_export.tiny import plain_model  # noqa: E402

ONES = np.ones((8, 8), np.float32)


def keys_of_images(writer: Any) -> None:
    a = writer.arch
    for name in (
        "vision.block_count",
        "vision.embedding_length",
        "image_token_id",
        "vision_start_token_id",
        "video_token_id",
    ):
        writer.add_uint32(f"{a}.{name}", 7)
    writer.add_uint32(f"{a}.mm.tokens_per_image", 256)
    writer.add_uint32(f"{a}.audio.block_count", 2)
    writer.add_array(f"{a}.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array(f"{a}.mrope_sections", [1, 1, 2])
    writer.add_array(f"{a}.rope.mrope_section", [1, 1, 2])
    writer.add_bool(f"{a}.rope.mrope_interleaved", True)
    writer.add_array(f"{a}.rope.dimension_sections", [1, 1, 2])


def tensors_of_images(writer: Any) -> None:
    for name in ("v.blk.0.attn_q.weight", "v.patch_embed.weight", "mm.input_projection.weight", "a.conv1d.0.weight"):
        writer.add_tensor(name, ONES)
    for name in ("mtp.fc.weight", "mtp.layers.0.attn_q.weight"):
        writer.add_tensor(name, ONES)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "gemma3_text"])
@pytest.mark.parametrize("more", [keys_of_images, tensors_of_images])
def test_what_changes_no_text_is_left_out(family: str, more: Callable[[Any], None], tmp_path: Path) -> None:
    plain = family == "gemma3_text"
    model = plain_model(family, torch.float32, layer_types=["sliding_attention"] * 3) if plain else linear_model(family)
    write_gguf(tmp_path / "plain.gguf", model)
    write_gguf(tmp_path / "more.gguf", model, extra=more)
    one, other = (open_source(tmp_path / f"{name}.gguf", attach_untrained=plain) for name in ("plain", "more"))
    assert one.config.to_dict() == other.config.to_dict() and one.weights.keys() == other.weights.keys()
    said = describe_gguf(tmp_path / "more.gguf")
    assert said["ignored"] == ("nothing" if more is keys_of_images else said["ignored"])
    if more is tensors_of_images:
        assert (
            "4 tensors of encoders of images" in said["ignored"] and "2 tensors of heads that guess" in said["ignored"]
        )
        assert said["model"] == describe_gguf(tmp_path / "plain.gguf")["model"]


@pytest.mark.parametrize("name", ["vision_scale", "rope.scaling.attn_mscale", "image", "mrope"])
def test_what_may_change_numbers_is_refused(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", linear_model("lfm2"), extra=lambda w: w.add_float32(f"{w.arch}.{name}", 2.0))
    with pytest.raises(UnsupportedModelError, match=name):
        open_source(tmp_path / "m.gguf")


def test_value_heads_in_the_order_of_the_folder(tmp_path: Path) -> None:
    """A file that says that its value heads were not reordered has the rows of transformers."""
    model = linear_model("qwen3_5_text")
    write_gguf(tmp_path / "turned.gguf", model)
    write_gguf(tmp_path / "same.gguf", model, extra=lambda w: w.add_bool(f"{w.arch}.ssm.v_head_reordered", True))
    write_gguf(tmp_path / "kept.gguf", model, extra=lambda w: w.add_bool(f"{w.arch}.ssm.v_head_reordered", False))
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    turned, same, kept = (
        value_of(open_source(tmp_path / f"{n}.gguf").weights[name]) for n in ("turned", "same", "kept")
    )
    assert torch.equal(turned, same) and not torch.equal(turned, kept)
    assert torch.equal(turned.sort(0).values, kept.sort(0).values)


@pytest.mark.parametrize("factors", [[0.5], [-3.0]])
def test_a_scale_beside_a_weight_multiplies_it(factors: list[float], tmp_path: Path) -> None:
    model = linear_model("lfm2")
    write_gguf(tmp_path / "plain.gguf", model)

    def add(writer: Any) -> None:
        writer.add_tensor("blk.0.ffn_up.scale", np.array(factors, np.float32))
        writer.add_tensor("blk.0.ffn_up.input_scale", np.array([9.0], np.float32))

    write_gguf(tmp_path / "scaled.gguf", model, extra=add)
    plain, scaled = (open_source(tmp_path / f"{name}.gguf").weights for name in ("plain", "scaled"))
    assert plain.keys() == scaled.keys()
    for name, weight in plain.items():
        times = factors[0] if name == "model.layers.0.feed_forward.w3.weight" else 1.0
        assert torch.equal(value_of(scaled[name]), value_of(weight) * times), name


def test_scales_of_experts(tmp_path: Path) -> None:
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14, num_dense_layers=1)
    model = linear_model(
        "lfm2_moe", layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True, **experts
    )
    factors = np.linspace(0.5, 3, 6, dtype=np.float32)
    write_gguf(tmp_path / "plain.gguf", model)
    write_gguf(tmp_path / "m.gguf", model, extra=lambda w: w.add_tensor("blk.1.ffn_down_exps.scale", factors))
    plain, scaled = (open_source(tmp_path / f"{name}.gguf").weights for name in ("plain", "m"))
    name = next(n for n in plain if "layers.1." in n and n.endswith("experts.down"))
    want = value_of(plain[name]) * torch.from_numpy(factors)[:, None, None]
    torch.testing.assert_close(value_of(scaled[name]), want, rtol=0, atol=0)
    write_gguf(tmp_path / "few.gguf", model, extra=lambda w: w.add_tensor("blk.1.ffn_down_exps.scale", factors[:4]))
    with pytest.raises(CheckpointError, match="4 scales"):
        value_of(open_source(tmp_path / "few.gguf").weights[name])


def test_a_scale_keeps_no_blocks(tmp_path: Path) -> None:
    """Blocks have scales of their own, without the factor."""
    model = linear_model("lfm2", hidden_size=64, intermediate_size=64)

    def coded(name: str, value: torch.Tensor) -> Any:
        if not name.endswith("ffn_up.weight"):
            return None
        kind = gguf.GGMLQuantizationType.Q8_0
        return gguf.quants.quantize(value.numpy(), kind), kind

    scale = np.array([0.25], np.float32)
    write_gguf(tmp_path / "m.gguf", model, coded, extra=lambda w: w.add_tensor("blk.0.ffn_up.scale", scale))
    weights = open_source(tmp_path / "m.gguf").weights
    assert weights["model.layers.0.feed_forward.w3.weight"].blocks is None  # type: ignore[union-attr]
    assert weights["model.layers.1.feed_forward.w3.weight"].blocks is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "keys, expected",
    [
        (
            {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 0},
            dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
        ),
        ({"top_k": 20}, dict(do_sample=True, top_k=20)),
        ({"temp": 0.0, "top_k": 20}, dict(do_sample=False)),
        ({}, dict(do_sample=False)),
    ],
    ids=["all", "one", "greedy", "none"],
)
def test_sampling_settings_are_the_models(keys: dict[str, float], expected: dict[str, Any], tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        for name, value in keys.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"general.sampling.{name}", value)

    write_gguf(tmp_path / "m.gguf", linear_model("lfm2"), extra=add)
    found = open_source(tmp_path / "m.gguf").generation.to_diff_dict()
    assert {name: found.get(name, name == "do_sample" and False) for name in expected} == expected


@pytest.mark.parametrize(
    "kind, policy", [("Q8_0", "int8"), ("Q4_0", "int4"), ("NVFP4", "int8"), ("F16", None), ("Q2_K", "int8")]
)
def test_an_export_keeps_the_bits_of_a_file(kind: str, policy: str | None, tmp_path: Path) -> None:
    """What `run` does with a file; codes that no kernel reads are rounded to 8 bits, and `--quantize none` asks for floats."""
    from still_export.targets.export import plan_job

    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    block, count = size if kind != "F16" else (1, 2)
    model = linear_model("lfm2", hidden_size=256, intermediate_size=256)

    def coded(name: str, value: torch.Tensor) -> Any:
        if value.dim() != 2 or not name.startswith("blk."):
            return None
        return np.zeros((value.shape[0], value.shape[1] // block * count), np.uint8), gguf.GGMLQuantizationType[kind]

    write_gguf(tmp_path / "m.gguf", model, coded)
    flags = {"model": str(tmp_path / "m.gguf")}
    assert plan_job("onnx", flags).export_options.quantize == policy
    assert plan_job("onnx", {**flags, "quantize": "none"}).export_options.quantize is None
    assert plan_job("onnx", {**flags, "quantize": "int8"}).export_options.quantize == "int8"
    assert plan_job("genai", flags).export_options.quantize is None
    assert plan_job("onnx", {"model": str(tmp_path / "m.folder")}).export_options.quantize is None
