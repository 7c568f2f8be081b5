"""Folders that the libraries themselves quantized: their weights to the last bit, exported and verified."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.graph.quantization.read import with_package_weights
from still_export.models.load import open_source
from still_export.models.read.source import find_source
from still_export.models.read.weights import Deferred, value_of
from still_export.proof.package import VerifyOptions, verify
from still_export.targets.export import export
from tests.still_export import fake_tensorrt
from tests.still_export.expert_models import expert_model
from tests.still_export.models.quantizers import ALONE, FORMS, PACKED, compressed, make_small
from tests.still_export.targets.portable.test_experts_export import WIDE
from tests.still_export.targets.portable.test_linear_export import call

LIGHT = tuple(
    name
    for name in FORMS
    if not name.startswith(("gptq", "awq")) and "nf4" not in name and name != "fp4 of bitsandbytes"
)
"""Those of libraries that are always there."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small(tmp_path_factory.mktemp("base") / "base")


@pytest.mark.parametrize("name", [n if n in LIGHT else pytest.param(n, marks=pytest.mark.long) for n in FORMS])
def test_weights_are_those_that_the_library_reads(name: str, base: Path, tmp_path: Path) -> None:
    made = FORMS[name]
    expected = made.maker(base, tmp_path / "model")
    source = open_source(tmp_path / "model", attach_untrained=True, dtype="float32")
    assert len(expected) == (13 if name == "mixed" else 14)
    for key, theirs in expected.items():
        weight = source.weights[key]
        assert isinstance(weight, Deferred) and weight.bits
        value = value_of(weight)
        assert torch.equal(value.to(theirs.dtype), theirs), key
        whole = weight.blocks is not None and not weight.blocks.float8  # e4m3 is exact for --quantize fp8 alone
        assert whole == made.exact or name == "mixed", key
        if weight.blocks is not None:
            order = slice(None) if weight.blocks.order is None else weight.blocks.order
            assert np.array_equal(weight.blocks.read().dequantized(), value.numpy()[:, order]), key
    if name == "mixed":
        alone = source.weights[f"{ALONE}.weight"]
        assert not isinstance(alone, Deferred) or not alone.bits


OFTEN = ("packed int4, zero points", "nvfp4")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in OFTEN else pytest.mark.long) for n in FORMS]
)
def test_packages_are_verified(name: str, base: Path, tmp_path: Path) -> None:
    """With the codes where they fit; of others the manifest names what was rounded again, and what that changed."""
    made = FORMS[name]
    expected = made.maker(base, tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), attach_untrained=True, dtype="float32", quantize=made.scheme)
    package = export(options, tmp_path / "package")
    codes, count = package.manifest["source_codes"], len(expected)
    assert codes["floats"] == 0
    if name == "mixed":
        assert codes["exact"] == 6 and all("self_attn" in rounded for rounded in codes["rounded"])
    else:
        assert (codes["exact"], len(codes["rounded"])) == ((count, 0) if made.exact else (0, count))
    eight = made.scheme == "int8" or name == "mixed"  # beside 4 bits, weights of more are not rounded to 4
    bounds = (1e-4, 0.02) if eight else (0.01, 0.2)
    assert all(bounds[0] < error < bounds[1] for error in codes["rounded"].values())
    if made.block:
        assert package.manifest["quantization"]["block_size"] == made.block
    assert verify(package.path, VerifyOptions(lengths=(33,), decode_steps=2)).report.passed


@pytest.mark.long
def test_experts_keep_their_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gate and up projection take turns in the stack; the rest of the model is rounded to nearest, which is no second rounding."""
    expert_model("qwen3_5_moe", seed=3, **WIDE).save_pretrained(tmp_path / "base")
    expected = compressed(("pack-quantized", "experts.", {**PACKED, "group_size": 16}))(
        tmp_path / "base", tmp_path / "model"
    )
    given = ("--quantize", "int4", "--dtype", "float32", "-o", tmp_path / "package")
    assert call("export", tmp_path / "model", *given) == 0
    assert "rounded again" not in capsys.readouterr().err
    manifest = json.loads((tmp_path / "package/manifest.json").read_text())
    experts = {name.partition("experts.")[0] for name in expected}
    assert manifest["source_codes"] == {"exact": 2 * len(experts), "floats": 0, "rounded": {}} and len(experts) == 3
    source = find_source(ExportOptions.from_manifest(manifest))
    held = with_package_weights(source, tmp_path / "package", manifest).weights
    for name, theirs in expected.items():
        module, number, part, _ = name.rsplit(".", 3)
        stack = value_of(held[f"{module}.{'down' if part == 'down_proj' else 'gate_up'}"])[int(number)]
        assert torch.equal({"gate_proj": stack[::2], "up_proj": stack[1::2], "down_proj": stack}[part], theirs), name
    assert call("verify", tmp_path / "package", "--lengths", "1,33", "--decode-steps", "2", "--quiet") == 0


@pytest.mark.slow
def test_exports_say_what_was_rounded_again(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FORMS["mixed"].maker(base, tmp_path / "model")
    given = ("--attach-untrained", "-o", tmp_path / "package")
    assert call("export", tmp_path / "model", *given, "--quantize", "int4") == 0
    said = capsys.readouterr().err
    assert (
        "rounded again: model.layers.*.self_attn.k_proj.weight (2), model.layers.*.self_attn.o_proj.weight (1)" in said
    )
    assert "mlp" not in said and "relative errors are up to " in said
    assert call("export", tmp_path / "model", *given, "--force") == 0
    assert "13 weights are codes in the source, and float32 here" in capsys.readouterr().err


CODES = {
    "packed int4": ("onnx", "half", "trt8", "trt-rtx", "genai", "web"),
    "packed int4, zero points": ("onnx", "half", "trt8", "genai", "web"),
    "packed int8, zero points": ("onnx", "half", "trt8", "genai", "web"),
    "int8, channels": ("onnx", "half", "trt8", "trt", "trt-rtx", "genai", "web"),
    "int8, blocks": ("onnx", "half", "trt8", "trt-rtx", "genai", "web"),
    "nvfp4": ("onnx", "half", "genai", "web"),
    "mxfp4": ("onnx", "half", "trt8", "trt-rtx", "genai", "web"),
    "fp8, channels": (),
}
"""Targets whose packages have the codes of a form, as docs/reference/quantization.md says; "half" is onnx in float16."""


@pytest.mark.long
@pytest.mark.parametrize("to", ["onnx", "half", "trt", "trt8", "trt-rtx", "genai", "web"])
@pytest.mark.parametrize("name", CODES)
def test_targets_hold_the_codes_or_say_what_was_rounded(
    name: str, to: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "still_export.targets.trt.package._write_plugins",
        lambda graph, target, *a: fake_tensorrt.write_libraries(target),
    )
    FORMS[name].maker(base, tmp_path / "model")
    dtype = "float32" if to in ("onnx", "genai", "web") else "float16"
    options = ExportOptions(str(tmp_path / "model"), attach_untrained=True, dtype=dtype, quantize=FORMS[name].scheme)
    package = export(options, tmp_path / "package", to="onnx" if to == "half" else to)
    codes = package.manifest["source_codes"]
    assert codes["floats"] == 0 and (codes["exact"], len(codes["rounded"])) == (
        (14, 0) if to in CODES[name] else (0, 14)
    )
    assert all(0 < error < 0.15 for error in codes["rounded"].values())
