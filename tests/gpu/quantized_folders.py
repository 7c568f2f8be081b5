"""Model folders whose projections are quantized, in the forms that others' tools write and vLLM reads; rounded to the nearest, so without
those tools.

  python -m tests.gpu.quantized_folders FOLDER FORM PLACE     # writes PLACE/FORM
"""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 64
"""Input channels that share a scale, where weights have 4 bits."""
LEAST = 2.0**-14
"""Scale of groups of zeros, of which Qwen2.5-Coder has some."""
FP8 = torch.finfo(torch.float8_e4m3fn).max
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight output channels lies at each four bits."""


def nibbles(values: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32, each of eight values in 0..15 along `axis`."""
    parts = values.to(torch.int64).movedim(axis, -1).unflatten(-1, (-1, 8))
    packed = sum(parts[..., value] << 4 * place for place, value in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, axis).contiguous()


def four_bits(weight: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a weight [out, in]: its values 0..15 [out, in], scales and zero points [out, in / GROUP], and what they mean [out, in]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    if symmetric:
        scale = (groups.abs().amax(-1) / 7).clamp(min=LEAST)
        zero = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=LEAST)
        zero = (-low / scale).round()
    scale = scale.bfloat16().float()  # which float16 has, too
    values = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    meant = (values - zero[..., None]) * scale[..., None]
    return values.flatten(1), scale, zero, meant.flatten(1)


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, zero, meant = four_bits(weight, symmetric=True)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    stored = nibbles(zero.T - 1, 1)  # one less, as its first version has it
    return {"qweight": nibbles(values.T, 0), "scales": scale.T.half(), "qzeros": stored, "g_idx": index}, meant


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, zero, meant = four_bits(weight, symmetric=False)
    packed = {"qweight": nibbles(values.T, 1, AWQ_ORDER), "qzeros": nibbles(zero.T, 1, AWQ_ORDER)}
    return {**packed, "scales": scale.T.half()}, meant


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    values = (weight.float() / scale).round()
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / FP8
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def as_it_is(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": weight}, weight


def through(kind: torch.dtype, most: float, x: Tensor) -> Tensor:
    """`x` as a type of 8 bits with a scale a row holds it."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-8) / most
    values = x.float() / scale
    return ((values.round() if kind == torch.int8 else values).to(kind).float() * scale).to(x.dtype)


def round_inputs(kind: torch.dtype, most: float, weights: bool, model: Any) -> None:
    """Let products of a model take what 8 bits hold of their inputs, and of their weights."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, inputs: (through(kind, most, inputs[0]), *inputs[1:]))
            if weights:
                module.weight.data = through(kind, most, module.weight.data)


def compressed(kind: str, form: str) -> dict[str, Any]:
    """What compressed-tensors says of 8 bits: a scale an output channel, one a token, found as it comes."""
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**both, "strategy": "channel", "dynamic": False},
        "input_activations": {**both, "strategy": "token", "dynamic": True},
    }
    named = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**named, "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp.gate$"]}


Write = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
in_int8 = partial(round_inputs, torch.int8, 127)
in_fp8 = partial(round_inputs, torch.float8_e4m3fn, FP8)
FORMS: dict[str, tuple[Write, dict[str, Any], Callable[[Any], None]]] = {
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
        lambda model: None,
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        lambda model: None,
    ),
    "compressed-tensors int8": (int8, compressed("int", "int-quantized"), partial(in_int8, False)),
    "compressed-tensors fp8": (fp8, compressed("float", "float-quantized"), partial(in_fp8, False)),
    "fp8 as it is loaded": (as_it_is, {}, partial(in_fp8, True)),
}
"""How a weight is written and what it then means, what config.json says (nothing: the engine is told to quantize), and what PyTorch's model
does to round as the engine."""


def quantized_folders(folder: Path, form: str, place: Path) -> tuple[Path, Path]:
    """A model folder in one of FORMS, and one with the very weights that it means, in float32."""
    write, said, _ = FORMS[form]
    small, meant = place / form.replace(" ", "-"), place / f"{form.replace(' ', '-')}-meant"
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    files = sorted(folder.glob("model*.safetensors"))
    for name, tensor in (each for file in files for each in load_file(file).items()):
        if name.endswith("_proj.weight"):
            written, whole = write(tensor)
            tensors[0].update({f"{name.removesuffix('weight')}{part}": x.contiguous() for part, x in written.items()})
            tensors[1][name] = whole.float().contiguous()
        else:
            tensors[0][name], tensors[1][name] = tensor, tensor.float()
    config = json.loads((folder / "config.json").read_text())
    small_config = {**config, "quantization_config": said} if said else config
    for to, content, values in ((small, tensors[0], small_config), (meant, tensors[1], {**config, "dtype": "float32"})):
        shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(content, to / "model.safetensors", {"format": "pt"})
        (to / "config.json").write_text(json.dumps(values))
    return small, meant


if __name__ == "__main__":
    folder, form, place = sys.argv[1:]
    made, meant = quantized_folders(Path(folder), form, Path(place))
    shutil.rmtree(meant)
    print(made)
