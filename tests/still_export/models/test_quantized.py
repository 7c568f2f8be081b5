"""Quantized checkpoints of others: their weights to the last bit, and their codes in the graph."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from still_export.errors import CheckpointError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.models.load import load_model, open_source
from still_export.models.quantized import AWQ_ORDER, Grouped, _grouped, _UnreadError, dequantizing
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.weights import Deferred, value_of
from still_export.proof.package import VerifyOptions, verify
from still_export.targets.export import export
from tests.still_export.files import edit_json, edit_tensors, read_json
from tests.still_export.models import quantizers

BITS, GROUP = 4, 32
Maker = Callable[[str, Tensor, dict[str, Tensor]], Tensor]
"""Puts the tensors of a layer with this weight into the file's; gives the weight that they stand for, float32."""


def words(fields: np.ndarray, bits: int = BITS) -> Tensor:
    """Numbers [..., W * 32 / bits] in int32 words, the first lowest."""
    rows = fields.reshape(-1, fields.shape[-1]).tolist()
    numbers = [sum(number << (bits * place) for place, number in enumerate(row)) for row in rows]
    raw = b"".join(number.to_bytes(fields.shape[-1] * bits // 8, "little") for number in numbers)
    return torch.from_numpy(np.frombuffer(raw, np.int32).reshape(*fields.shape[:-1], -1).copy())


def grouped(
    weight: Tensor, bits: int, symmetric: bool, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Random codes [N, K], scales and zero points [N, G], and the weight."""
    random = np.random.default_rng(weight.numel())
    outputs, count = len(weight), int(groups.max()) + 1
    codes = random.integers(0, 1 << bits, weight.shape)
    scales = (random.random((outputs, count)) * 0.02 + 1e-3).astype(np.float16)
    zero = np.full_like(scales, 1 << (bits - 1)) if symmetric else random.integers(0, 1 << bits, scales.shape)
    value = (codes - zero[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
    return codes, scales, zero.astype(np.int64), torch.from_numpy(value)


def gptq(bits: int = BITS, symmetric: bool = False, act_order: bool = False, format_2: bool = False) -> Maker:
    def make(module: str, weight: Tensor, file: dict[str, Tensor]) -> Tensor:
        groups = np.arange(weight.shape[1]) // GROUP
        if act_order:
            groups = np.random.default_rng(1).permutation(groups)
        codes, scales, zero, value = grouped(weight, bits, symmetric, groups)
        file[f"{module}.qweight"] = words(codes, bits).t().contiguous()
        if format_2:
            file[f"{module}.qzeros"] = words(zero.T, bits)
        elif 32 % bits:
            file[f"{module}.qzeros"] = words((zero.T - 1) % (1 << bits), bits)
        else:  # a zero point of 0 borrows from the next one of its word
            file[f"{module}.qzeros"] = words(zero.T, bits) - words(np.ones((1, 32 // bits), np.int64), bits)
        file[f"{module}.scales"] = torch.from_numpy(scales.T.copy())
        file[f"{module}.g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return value

    return make


def auto_round(bits: dict[str, int], format_2: bool = False) -> Maker:
    """GPTQ's form without `g_idx`, with the bits of each layer by the end of its name."""

    def make(module: str, weight: Tensor, file: dict[str, Tensor]) -> Tensor:
        own = next((count for end, count in bits.items() if module.endswith(end)), BITS)
        value = gptq(own, format_2=format_2)(module, weight, file)
        del file[f"{module}.g_idx"]
        return value

    return make


def awq(module: str, weight: Tensor, file: dict[str, Tensor]) -> Tensor:
    codes, scales, zero, value = grouped(weight, BITS, False, np.arange(weight.shape[1]) // GROUP)

    def reordered(fields: np.ndarray) -> Tensor:
        return words(fields.reshape(len(fields), -1, 8)[..., list(AWQ_ORDER)].reshape(len(fields), -1))

    file[f"{module}.qweight"], file[f"{module}.qzeros"] = reordered(codes.T), reordered(zero.T)
    file[f"{module}.scales"] = torch.from_numpy(scales.T.copy())
    return value


FORMS: dict[str, tuple[Maker, dict[str, Any]]] = {
    "gptq": (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}),
    "gptq symmetric": (gptq(symmetric=True), {"quant_method": "gptq", "bits": 4, "sym": True}),
    "gptq v2": (gptq(format_2=True), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq act-order": (gptq(act_order=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq 2 bits": (gptq(2), {"quant_method": "gptq", "bits": 2}),
    "gptq of other bits here": (gptq(8), {"quant_method": "gptq", "bits": 4, "dynamic": {".*": {"bits": 8}}}),
    "gptq 8 bits": (gptq(8, symmetric=True), {"quant_method": "gptq", "bits": 8, "sym": True}),
    "gptq 3 bits": (gptq(3), {"quant_method": "gptq", "bits": 3}),
    "auto-round, mixed": (
        auto_round({"down_proj": 8, "q_proj": 2, "k_proj": 3, "up_proj": 5}),
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "extra_config": {".*": {}}},
    ),
    "auto-round, zero points": (
        auto_round({}, format_2=True),
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
    ),
    "auto-round of 2024": (
        auto_round({}),
        {"quant_method": "intel/auto-round", "bits": 4, "backend": "auto_round:gptq:exllamav2"},
    ),
    "auto-round as awq": (
        awq,
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "zero_point": True}),
}
"""By name: who makes it, quantization_config."""


def quantized_folder(base: Path, folder: Path, name: str) -> dict[str, Tensor]:
    """`base` with the linear layers of its first layer in this form, or all in one of a library; the weights that they stand for."""
    if name not in FORMS:
        return quantizers.FORMS[name].maker(base, folder)
    maker, config = FORMS[name]
    shutil.copytree(base, folder)
    file = load_file(folder / "model.safetensors")
    found = {}
    for key in [key for key in file if "layers.0." in key and key.endswith("_proj.weight")]:
        weight = file.pop(key)
        found[key] = maker(key.removesuffix(".weight"), weight, file)
    save_file(file, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=config)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantizers.make_small(tmp_path_factory.mktemp("base") / "base")


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_of_the_file(name: str, base: Path, tmp_path: Path) -> None:
    expected = quantized_folder(base, tmp_path / "model", name)
    source = open_source(tmp_path / "model", attach_untrained=True, dtype="float32")
    assert len(expected) == 7
    for key, value in expected.items():
        assert torch.equal(value_of(source.weights[key]), value), key
        weight = source.weights[key]
        assert isinstance(weight, Deferred)
        if weight.blocks is not None:
            order = slice(None) if weight.blocks.order is None else weight.blocks.order
            assert np.array_equal(weight.blocks.read().dequantized(), value.numpy()[:, order]), key
            assert np.array_equal(weight.blocks.read().split(16).dequantized(), value.numpy()[:, order]), key
    model = source.read()
    assert torch.isfinite(model(input_ids=torch.arange(5)[None])[0]).all()
    assert getattr(model.config, "quantization_config", None) is None
    half = load_model(tmp_path / "model", attach_untrained=True, dtype="float16")
    key = next(iter(expected))
    assert torch.equal(half.state_dict()[key], expected[key].half())


SELDOM = (pytest.param(name, marks=pytest.mark.long) for name in ("gptq symmetric", "awq", "fp8, channels"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "gptq act-order", "int8, channels", *SELDOM])
def test_graphs_hold_the_codes(name: str, base: Path, tmp_path: Path) -> None:
    expected = quantized_folder(base, tmp_path / "model", name)
    (scheme, bits), exact = ("int4", 4) if name in FORMS else ("int8", 8), name != "fp8, channels"
    options = ExportOptions(str(tmp_path / "model"), attach_untrained=True, dtype="float32", quantize=scheme)
    package = export(options, tmp_path / "package")
    said = package.manifest["quantization"]
    counted = {(e["bits"], e["method"]) for role in ("projection", "feed_forward") for e in said["roles"][role]}
    assert said["block_size"] == 32 and ((bits, "exact") in counted) == exact
    graph = onnx.load(package.path / "model.onnx")
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    key = next(key for key in expected if "down_proj" in key)
    node = next(n for n in graph.graph.node if n.op_type == "MatMulNBits" and n.input[1] == f"{key}.blocks")
    scales = stored.get(f"{key}.scales")
    zero = next((stored[i] for i in node.input if i.endswith(".zero_points")), None)
    assert scales is not None
    found = BlockWeight(stored[f"{key}.blocks"], scales, zero, next(a.i for a in node.attribute if a.name == "bits"))
    if name in ("gptq", "gptq act-order"):
        assert verify(package.path, VerifyOptions(lengths=(1, 65), decode_steps=4)).report.passed
    order = stored.get(f"{key}.order", np.arange(192))
    assert (f"{key}.order" in stored) == (name == "gptq act-order")
    codes, right = package.manifest["source_codes"], expected[key].numpy()[:, order]
    loss = np.linalg.norm(found.dequantized() - right) / np.linalg.norm(right)
    assert codes["floats"] == 0 and codes["exact"] == (len(expected) if exact else 0) and loss < 0.05
    assert (loss == 0) == exact and codes["rounded"].get(key, 0) == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("gptq", lambda f, m: f.update({f"{m}.scales": f[f"{m}.scales"][:-1]}), "qzeros has shape"),
        ("gptq", lambda f, m: f.pop(f"{m}.qzeros"), "lacks 'qzeros'"),
        ("gptq act-order", lambda f, m: f.pop(f"{m}.g_idx"), "lacks 'g_idx'"),
        ("gptq", lambda f, m: f[f"{m}.g_idx"].fill_(9), "g_idx names groups outside 0..3"),
        (
            "gptq",
            lambda f, m: [f.update({f"{m}.{n}": f[f"{m}.{n}"][:0]}) for n in ("scales", "qzeros")],
            "is empty",
        ),
        ("awq", lambda f, m: f.update({f"{m}.qzeros": f[f"{m}.qzeros"][:, 1:].contiguous()}), "qzeros has shape"),
        ("packed int4", lambda f, m: f.pop(f"{m}.weight_shape"), "lacks 'weight_shape'"),
        (
            "packed int4",
            lambda f, m: f.update({f"{m}.weight_scale": f[f"{m}.weight_scale"][:3]}),
            "weight_scale has shape",
        ),
        ("int8, channels", lambda f, m: f.pop(f"{m}.weight_scale"), "lacks 'weight_scale'"),
        (
            "fp8 of transformers",
            lambda f, m: f.update({f"{m}.weight_scale_inv": torch.ones(3, 3)}),
            "scales of blocks of",
        ),
    ],
)
def test_damaged_layers_are_named(
    name: str, change: Callable[[dict[str, Tensor], str], Any], message: str, base: Path, tmp_path: Path
) -> None:
    quantized_folder(base, tmp_path / "model", name)
    module = "model.layers.0.self_attn.q_proj"
    edit_tensors(tmp_path / "model", lambda file: change(file, module))
    with pytest.raises(CheckpointError, match=f"{module}.* in .*{message}"):
        open_source(tmp_path / "model", attach_untrained=True)


def test_unknown_methods_and_groups_that_do_not_divide(base: Path, tmp_path: Path) -> None:
    quantized_folder(base, tmp_path / "model", "gptq")
    path = tmp_path / "model" / "config.json"
    config = read_json(path)["quantization_config"]
    for said, message in (
        ({"quant_method": "aqlm"}, "quantized by aqlm; gptq, awq"),
        ({"bits": 9}, "9 bits, where 2 to 8 are read"),
        ({"checkpoint_format": "marlin"}, "are in the format marlin, where gptq and gptq_v2 are read"),
    ):
        edit_json(path, quantization_config=config | said)
        with pytest.raises(UnsupportedError, match=message):
            open_source(tmp_path / "model", attach_untrained=True)
    shape = (8, 40)
    nothing = torch.zeros
    with pytest.raises(_UnreadError, match="3 groups of 40 inputs"):
        _grouped(Grouped(shape, 4, 3, lambda: nothing(shape), lambda: nothing(8, 3), None))


@pytest.mark.parametrize(
    ("inputs", "groups", "g_idx", "act_order", "read"),
    [
        (96, 3, "none", False, True),
        (96, 3, "zeros", False, True),
        (96, 3, "zeros", True, False),
        (96, 3, "some", False, False),
        (96, 3, "some", True, False),
        (96, 1, "zeros", True, True),
        (96, 3, "shuffled", True, True),
        (80, 3, "in order", False, True),
        (80, 3, "none", False, True),
        (80, 3, "zeros", False, True),
    ],
)
def test_groups_of_gptq(inputs: int, groups: int, g_idx: str, act_order: bool, read: bool) -> None:
    """Without act-order the groups are in order, whatever a writer left in g_idx; the last one may be shorter."""
    size = 32 if groups > 1 else inputs
    in_order = torch.arange(inputs) // size
    of_input = in_order[torch.randperm(inputs)] if g_idx == "shuffled" else in_order
    codes, zero, scales = (
        torch.randint(0, 16, (inputs, 8)),
        torch.randint(1, 16, (groups, 8)),
        torch.rand(groups, 8) + 0.1,
    )
    packed = words(codes.t().numpy().astype(np.uint8)).t().contiguous()
    file = {"a.qweight": packed, "a.qzeros": words((zero - 1).numpy().astype(np.uint8)), "a.scales": scales}
    stored = {"zeros": torch.zeros(inputs), "some": in_order // 2 * 2, "shuffled": of_input, "in order": in_order}
    if g_idx != "none":
        file["a.g_idx"] = stored[g_idx].int()
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": act_order}
    if not read:
        with pytest.raises(CheckpointError, match=r"g_idx names . of 3 groups"):
            dequantizing(file, config, "here")
        return
    weight = dequantizing(file, config, "here")["a.weight"]
    assert isinstance(weight, Deferred)
    torch.testing.assert_close(weight.read(), ((codes - zero[of_input]) * scales[of_input]).t())


@pytest.mark.parametrize(
    ("parts", "config", "said"),
    [
        (
            {"weight": torch.zeros(8, 8, dtype=torch.int8), "SCB": torch.ones(8)},
            {"quant_method": "bitsandbytes"},
            "SCB",
        ),
        (
            {
                "weight": torch.ones(8, 32, dtype=torch.int8),
                "weight_scale": torch.ones(8, 1),
                "input_zero_point": torch.ones(1),
            },
            {"quant_method": "compressed-tensors"},
            "input_zero_point",
        ),
        (
            {"qweight": torch.zeros(32, 16).int(), "qzeros": torch.zeros(32, 1).int(), "scales": torch.ones(32, 1)},
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "gemv",
        ),
        (
            {
                "weight_packed": torch.zeros(4, 16).int(),
                "scale_packed": torch.ones(1, 32),
                "meta": torch.zeros(4, 8, dtype=torch.int16),
            },
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "meta, scale_packed",
        ),
        (
            {
                "qweight": torch.zeros(2, 8, dtype=torch.int64),
                "qzeros": torch.zeros(1, 1, dtype=torch.int64),
                "scales": torch.ones(1, 8),
            },
            {"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"},
            "qweight in int64",
        ),
        (
            {"weight": torch.ones(8, 32, dtype=torch.bfloat16), "weight_scale": torch.ones(8, 1)},
            {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen"},
            "a weight in bfloat16 beside its scale",
        ),
        (
            {
                "weight_packed": torch.zeros(8, 8, dtype=torch.int32),
                "weight_scale": torch.ones(8, 1),
                "weight_shape": torch.tensor([8, 32]),
            },
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 7}}}},
            "7 bits",
        ),
    ],
    ids=["bitsandbytes", "compressed-tensors", "awq", "sparse marlin", "gptq of int64", "not rounded yet", "7 bits"],
)
def test_sound_forms_that_are_not_read(parts: dict[str, Tensor], config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{said}.* is not supported. Use another form") as caught:
        dequantizing({f"a.{name}": part for name, part in parts.items()}, config, "here")
    assert "damaged" not in str(caught.value) and "fetch" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "are sparse"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R4": {}}}}, "were rotated"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "qqq"}, "are in the format qqq"),
    ],
)
def test_what_no_tensor_shows_is_read_of_the_configuration(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"weights {said}.* is not supported"):
        dequantizing({"a.weight.compressed": torch.zeros(8, 4), "a.weight.bitmask": torch.zeros(8, 1)}, config, "here")


@pytest.mark.parametrize(
    ("shape", "high", "wide"),
    [((40, 64), 1, 24), ((40, 64), 24, 1), ((40, 64), 16, 24), ((40, 64), 96, 96), ((8, 64), 4, 16)],
)
def test_blocks_are_of_the_size_that_the_configuration_says(shape: tuple[int, int], high: int, wide: int) -> None:
    """The last one has as many blocks as outputs, as layers of 16,384 inputs have them in blocks of 128."""
    outputs, inputs = shape
    narrow = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // high), -(-inputs // wide)) + 0.1
    config = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    weight = dequantizing({"a.weight": narrow, "a.weight_scale_inv": scales}, config, "here")["a.weight"]
    assert isinstance(weight, Deferred)
    spread = scales.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
    assert torch.equal(weight.read(), narrow.float() * spread)


@pytest.mark.parametrize(("bits", "stored"), [(4, 7), (4, 8), (8, 127), (8, 128), (2, 1), (2, 2)])
def test_symmetric_zero_points_of_either_format_are_the_middle(bits: int, stored: int) -> None:
    """Published files (Qwen3.5's GPTQ-Int4) say gptq and store the middle as gptq_v2 does: kernels for symmetric codes read neither."""
    codes, scales = torch.randint(0, 1 << bits, (16, 64)), torch.rand(2, 16) + 0.1
    packed = words(codes.numpy().astype(np.uint8), bits).t().contiguous()
    theirs = {"a.qweight": packed, "a.qzeros": words(np.full((2, 16), stored), bits), "a.scales": scales}
    config = {"quant_method": "gptq", "bits": bits, "sym": True, "group_size": 32, "checkpoint_format": "gptq"}
    found = value_of(dequantizing(theirs, config, "here")["a.weight"])
    torch.testing.assert_close(found, (codes - (1 << (bits - 1))) * scales.t().repeat_interleave(32, 1))


def test_groups_that_compressed_tensors_left_unset_are_in_order() -> None:
    codes, scales = torch.randint(0, 16, (8, 64)), torch.rand(8, 2) + 0.1
    theirs = {"a.weight_packed": words(codes.numpy().astype(np.uint8)), "a.weight_scale": scales}
    theirs |= {"a.weight_shape": torch.tensor([8, 64]), "a.weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    found = dequantizing(theirs, {"quant_method": "compressed-tensors"}, "here")["a.weight"]
    assert torch.equal(value_of(found), (codes - 8) * scales.repeat_interleave(32, 1))


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_bytes_of_bitsandbytes_in_any_type(storage: torch.dtype) -> None:
    """FSDP trains models whose codes are stored as numbers of its type (bnb_4bit_quant_storage); high four bits come first."""
    codes, table, most = torch.randint(0, 16, (8, 64)), torch.randn(16), torch.rand(8) + 0.1
    pairs = codes.view(-1, 2).to(torch.uint8)
    state = json.dumps({"shape": [8, 64], "blocksize": 64}).encode()
    parts = {
        "a.weight": (pairs[:, 0] << 4 | pairs[:, 1]).view(-1, storage.itemsize).view(storage),
        "a.weight.absmax": most,
        "a.weight.quant_map": table,
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    found = value_of(dequantizing(parts, {"quant_method": "bitsandbytes"}, "here")["a.weight"])
    assert torch.equal(found, table[codes] * most[:, None])


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_biases_of_a_class_without_any_are_left_out_where_they_are_zero(
    base: Path, tmp_path: Path, bias: float
) -> None:
    """GPTQ's writers put zeros beside every layer of Llama; transformers ignores them."""
    expected = quantized_folder(base, tmp_path / "model", "gptq")
    module = "model.layers.0.self_attn.o_proj"
    edit_tensors(tmp_path / "model", lambda file: file.update({f"{module}.bias": torch.full((96,), bias)}))
    if bias:
        with pytest.raises(UnsupportedError, match=r"o_proj\.bias"):
            open_source(tmp_path / "model", attach_untrained=True)
        return
    weights = open_source(tmp_path / "model", attach_untrained=True, dtype="float32").weights
    assert torch.equal(value_of(weights[f"{module}.weight"]), expected[f"{module}.weight"])


def test_folders_of_model_optimizer_say_it_in_a_file_of_its_own(base: Path, tmp_path: Path) -> None:
    expected = quantized_folder(base, tmp_path / "model", "fp8, channels")
    path = tmp_path / "model" / "config.json"
    edit_json(path, quantization_config=None)
    (path.parent / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    weights = open_source(path.parent, attach_untrained=True, dtype="float32").weights
    assert all(torch.equal(value_of(weights[key]), value) for key, value in expected.items())


def test_four_bit_floats_by_definition(tmp_path: Path) -> None:
    """NVFP4 as compressed-tensors and as modelopt have it, and NF4 with scales that are quantized themselves."""
    random = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (6, 16), generator=random, dtype=torch.uint8)
    scales = (torch.rand(6, 2, generator=random) + 0.1).to(torch.float8_e4m3fn)
    expected = torch.empty(6, 32)
    for i in range(6):
        for j in range(32):
            code = int(packed[i, j // 2]) >> 4 * (j % 2) & 15
            expected[i, j] = (-1) ** (code >> 3) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * float(scales[i, j // 16])
    theirs = {"a.weight_packed": packed, "a.weight_scale": scales, "a.weight_global_scale": torch.tensor([4.0])}
    found = dequantizing(theirs, {"quant_method": "compressed-tensors"}, "here")
    assert list(found) == ["a.weight"] and torch.equal(value_of(found["a.weight"]), expected / 4)
    theirs = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": torch.tensor(0.25), "a.bias": scales[0]}
    found = dequantizing(theirs, {"quant_method": "modelopt"}, "here")
    assert set(found) == {"a.weight", "a.bias"} and torch.equal(value_of(found["a.weight"]), expected / 4)

    table, nested = torch.linspace(-1, 1, 16), torch.linspace(0, 1, 256)
    most, outer = torch.randint(0, 256, (3,), generator=random, dtype=torch.uint8), torch.tensor([0.5, 0.75])
    state = {"shape": [6, 32], "blocksize": 64, "nested_blocksize": 2, "nested_offset": 0.125}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    theirs = {
        "a.weight": packed.reshape(-1, 1),
        "a.weight.absmax": most,
        "a.weight.quant_map": table,
        "a.weight.nested_absmax": outer,
        "a.weight.nested_quant_map": nested,
        "a.weight.quant_state.bitsandbytes__nf4": text,
    }
    found = dequantizing(theirs, {"quant_method": "bitsandbytes"}, "here")
    flat = value_of(found["a.weight"]).flatten()
    for at in range(192):
        code = int(packed.flatten()[at // 2]) >> 4 * (1 - at % 2) & 15
        scale = nested[int(most[at // 64])] * outer[at // 64 // 2] + 0.125
        assert torch.isclose(flat[at], table[code] * scale, rtol=1e-6)
    with pytest.raises(CheckpointError, match="a in b is no layer of modelopt: weight_scale has "):
        dequantizing({"a.weight": packed, "a.weight_scale": scales.float()}, {"quant_method": "modelopt"}, "b")
    theirs["a.weight.absmax"] = most[:2]
    with pytest.raises(CheckpointError, match="a in here is no layer of bitsandbytes: weight and absmax have 96 and 2"):
        dequantizing(theirs, {"quant_method": "bitsandbytes"}, "here")
