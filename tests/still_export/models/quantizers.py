"""Folders quantized by the libraries that publish them, and the weights that the libraries read back."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.still_export.files import edit_json
from tests.still_export.training import make_base

ALONE = "model.layers.1.self_attn.o_proj"
"""A layer that mixed folders leave alone."""
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT = {"type": "int", "symmetric": True}

Maker = Callable[[Path, Path], dict[str, Tensor]]
"""Makes a folder of a base; gives its quantized weights as the library reads them."""


@dataclass(frozen=True)
class Made:
    """A form: its maker, the scheme that it is exported with, and whether that keeps its codes."""

    maker: Maker
    scheme: str
    exact: bool = True
    block: int | None = None


def make_small(folder: Path) -> Path:
    sizes = dict(hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=1, head_dim=64)
    return make_base(folder, num_hidden_layers=2, **sizes)


def write(
    base: Path, folder: Path, said: dict[str, Any], layer: Callable[[str, Tensor], dict[str, Tensor] | None]
) -> None:
    """`base` with other tensors in the place of each linear layer's weight; None: it stays."""
    shutil.copytree(base, folder)
    file = load_file(folder / "model.safetensors")
    for name in [name for name in file if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        if (found := layer(module, file[name])) is not None:
            del file[name]
            file |= {f"{module}.{part}": tensor.contiguous() for part, tensor in found.items()}
    save_file(file, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=said)


def compressed(*formats: tuple[str, str, dict[str, Any]]) -> Maker:
    """compressed-tensors: of each format its name, what the names of its layers hold, and its weights' arguments."""

    def make(base: Path, folder: Path) -> dict[str, Tensor]:
        package = pytest.importorskip("compressed_tensors")
        quantization, compressors = package.quantization, package.compressors
        groups: dict[str, Any] = {}
        for kind, part, weights in formats:
            target = f"re:.*{part}.*" if part else "Linear"
            groups[kind] = quantization.QuantizationScheme(targets=[target], weights=weights, format=kind)
        found = {}

        def layer(module: str, weight: Tensor) -> dict[str, Tensor] | None:
            kind = next((kind for kind, part, _ in formats if part in module), None)
            if kind is None or (len(formats) > 1 and module == ALONE):
                return None
            library = compressors.BaseCompressor.get_value_from_registry(kind)
            held = library.compress(qparams(weight, groups[kind].weights, quantization.utils), groups[kind])
            found[f"{module}.weight"] = library.decompress(dict(held), groups[kind])["weight"]
            if kind == "nvfp4-pack-quantized":  # in float32: `decompress` gives bfloat16, which hides the last bits
                whole = compressors.nvfp4.helpers.unpack_fp4_from_uint8(
                    held["weight_packed"], *weight.shape, torch.float32
                )
                scales = (held["weight_scale"].float(), None, groups[kind].weights, torch.float32)
                read = quantization.lifecycle.forward.dequantize
                found[f"{module}.weight"] = read(whole, *scales, held["weight_global_scale"])
            return dict(held)

        name = formats[0][0] if len(formats) == 1 else "mixed-precision"
        config = quantization.QuantizationConfig(config_groups=groups, format=name, ignore=["lm_head", ALONE])
        write(base, folder, json.loads(config.model_dump_json()), layer)
        return found

    return make


def qparams(weight: Tensor, args: Any, library: Any) -> dict[str, Tensor]:
    """A weight with scales and zero points by the library."""
    if args.strategy == "block":
        high, wide = args.block_structure
        short = (0, -weight.shape[1] % wide, 0, -weight.shape[0] % high)
        parts = torch.nn.functional.pad(weight, short).unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
        low, most = parts.amin((2, 3)), parts.amax((2, 3))
    elif args.group_size and args.group_size > 0:
        groups = weight.unflatten(1, (-1, args.group_size))
        low, most = groups.amin(-1), groups.amax(-1)
    else:
        axes = (1,) if args.strategy == "channel" else (0, 1)
        low, most = weight.amin(axes, keepdim=True), weight.amax(axes, keepdim=True)
    whole = library.generate_gparam(weight.amin(), weight.amax()) if args.strategy == "tensor_group" else None
    scales, zero = library.calculate_qparams(low, most, args, global_scale=whole)
    held = {} if whole is None else {"weight_global_scale": whole}
    return {"weight": weight, "weight_scale": scales, "weight_zero_point": zero, **held}


def gptqmodel(**how: Any) -> Maker:
    """GPTQModel: calibrated on random tokens."""

    def make(base: Path, folder: Path) -> dict[str, Tensor]:
        os.environ.setdefault(
            "GPTQMODEL_CPU_WORKERS", "2"
        )  # by itself it takes one on two cores, which it then refuses
        library = pytest.importorskip("gptqmodel")
        model = library.GPTQModel.load(str(base), library.QuantizeConfig(group_size=32, offload_to_disk=False, **how))
        random = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, 257, (1, 64), generator=random) for _ in range(8)]
        with contextlib.chdir(folder.parent):  # it writes a folder of logs where it runs
            model.quantize([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in tokens], batch_size=1)
            model.save(str(folder))
        if how.get("quant_method") == "awq":
            return dict(awq_weights(load_file(folder / "model.safetensors")))
        whole = folder.with_name(f"{folder.name}-whole")
        convert = pytest.importorskip("gptqmodel.utils.model_dequant").dequantize_model
        convert(folder, whole, target_dtype=torch.float32)
        dense = load_file(whole / "model.safetensors")
        return {name: weight for name, weight in dense.items() if name.endswith("_proj.weight")}

    return make


def awq_weights(file: dict[str, Tensor]) -> Any:
    packing = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils")
    for name in [name.removesuffix(".qweight") for name in file if name.endswith(".qweight")]:
        scales = file[f"{name}.scales"].float()
        whole = packing.dequantize_gemm(file[f"{name}.qweight"], file[f"{name}.qzeros"], scales, 4, 32)
        yield f"{name}.weight", whole.t().contiguous()


def four_bit_table(kind: str, nested: bool) -> Maker:
    """bitsandbytes by transformers."""

    def make(base: Path, folder: Path) -> dict[str, Tensor]:
        functional = pytest.importorskip("bitsandbytes.functional")
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, quantization_config=config, device_map="cpu"
        )
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        held = {n: m.weight for n, m in model.named_modules() if n.endswith("_proj")}
        return {f"{n}.weight": functional.dequantize_4bit(w.data, w.quant_state) for n, w in held.items()}

    return make


def modelopt(base: Path, folder: Path) -> dict[str, Tensor]:
    """NVFP4 as NVIDIA's Model Optimizer publishes it."""
    tensor = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    found = {}

    def layer(module: str, weight: Tensor) -> dict[str, Tensor]:
        held, scales, wide = tensor.quantize(weight, 16)
        found[f"{module}.weight"] = held.dequantize(
            torch.float32, scale=scales, double_scale=wide, block_sizes={-1: 16}
        )
        return {"weight": held._quantized_data, "weight_scale": scales, "weight_scale_2": wide}

    write(base, folder, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, layer)
    return found


def fine_grained(block: tuple[int, int] | None, scale_format: str = "float") -> Maker:
    """FP8 in blocks as transformers writes it, and reads it."""

    def make(base: Path, folder: Path) -> dict[str, Tensor]:
        library = pytest.importorskip("transformers.integrations.finegrained_fp8")
        config = transformers.FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_format)
        how = type("Quantizer", (), {"quantization_config": config})()

        def layer(module: str, weight: Tensor) -> dict[str, Tensor]:
            held = library.Fp8Quantize(how).convert({f"{module}.weight": weight})
            assert len(held) == 2
            return {name.removeprefix(f"{module}."): tensor for name, tensor in held.items()}

        write(base, folder, config.to_dict(), layer)
        read = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=block, scale_fmt=scale_format)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=read)
        return {name: weight for name, weight in model.state_dict().items() if name.endswith("_proj.weight")}

    return make


PACKED = {**INT, "num_bits": 4, "strategy": "group", "group_size": 32}
FORMS = {
    "packed int4": Made(compressed(("pack-quantized", "", PACKED)), "int4"),
    "packed int4, zero points": Made(compressed(("pack-quantized", "", {**PACKED, "symmetric": False})), "int4"),
    "packed int4, channels": Made(
        compressed(("pack-quantized", "", {**INT, "num_bits": 4, "strategy": "channel"})), "int4"
    ),
    "packed int8, zero points": Made(
        compressed(("pack-quantized", "", {**PACKED, "num_bits": 8, "symmetric": False})), "int8"
    ),
    "int8, channels": Made(compressed(("int-quantized", "", {**INT, "num_bits": 8, "strategy": "channel"})), "int8"),
    "int8, channels, zero points": Made(
        compressed(("int-quantized", "", {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"})),
        "int8",
    ),
    "int8, one scale": Made(compressed(("int-quantized", "", {**INT, "num_bits": 8, "strategy": "tensor"})), "int8"),
    "int8, blocks": Made(
        compressed(("naive-quantized", "", {**INT, "num_bits": 8, "strategy": "block", "block_structure": [48, 32]})),
        "int8",
    ),
    "fp8, channels": Made(compressed(("float-quantized", "", {**FP8, "strategy": "channel"})), "int8", False),
    "fp8, one scale": Made(compressed(("float-quantized", "", {**FP8, "strategy": "tensor"})), "int8", False),
    "fp8, groups": Made(
        compressed(("naive-quantized", "", {**FP8, "strategy": "group", "group_size": 32})), "int8", False
    ),
    "fp8, blocks of 128": Made(
        compressed(("float-quantized", "", {**FP8, "strategy": "block", "block_structure": [128, 128]})), "int8", False
    ),
    "fp8 of transformers": Made(fine_grained((32, 64)), "int8", False),
    "fp8 of transformers, powers of 2": Made(fine_grained((64, 32), "ue8m0"), "int4", False),
    "nvfp4": Made(
        compressed(
            (
                "nvfp4-pack-quantized",
                "",
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
            )
        ),
        "int8",
        block=16,
    ),
    "nvfp4 of modelopt": Made(modelopt, "int8", block=16),
    "mxfp4": Made(
        compressed(
            (
                "mxfp4-pack-quantized",
                "",
                {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
            )
        ),
        "int8",
    ),
    "mixed": Made(
        compressed(("pack-quantized", "mlp", PACKED), ("float-quantized", "self_attn", {**FP8, "strategy": "channel"})),
        "int4",
        False,
    ),
    "gptq": Made(gptqmodel(bits=4, sym=True, desc_act=False), "int4"),
    "gptq, zero points": Made(gptqmodel(bits=4, sym=False, desc_act=False), "int4"),
    "gptq, zero points, v2": Made(gptqmodel(bits=4, sym=False, desc_act=False, format="gptq_v2"), "int4"),
    "gptq, act-order": Made(gptqmodel(bits=4, sym=False, desc_act=True), "int4"),
    "gptq, 8 bits, zero points": Made(gptqmodel(bits=8, sym=False, desc_act=False), "int8"),
    "gptq, 2 bits": Made(gptqmodel(bits=2, sym=False, desc_act=False), "int4"),
    "awq": Made(gptqmodel(bits=4, sym=False, quant_method="awq", format="gemm"), "int4"),
    "nf4": Made(four_bit_table("nf4", False), "int8", False),
    "nf4, nested": Made(four_bit_table("nf4", True), "int4", False),
    "fp4 of bitsandbytes": Made(four_bit_table("fp4", True), "int8", False),
}
"""By name."""
