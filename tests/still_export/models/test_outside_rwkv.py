"""Trained RWKV models of rwkv.cpp (MIT), whose logits are another implementation's; skipped where ../shared is not."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from still_export.graph.options import ExportOptions
from still_export.models.load import load_model
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions

MODELS = Path(__file__).resolve().parents[4] / "shared/models/rwkv"
PROMPT = list(b'"in')
HALF = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
OFF = {"5v2-730K": 1e-5, "6v0-3m": 0.04}
"""Of the largest logit. The second model's weights have 5 bits, and its logits are those of the weights before."""


def tensors(path: Path) -> dict[str, Tensor]:
    """Of rwkv.cpp's container: six numbers, then dimensions, name and data of each tensor, the fastest dimension first."""
    data, at = path.read_bytes(), 24
    found: dict[str, Tensor] = {}
    while at < len(data):
        count, length, kind = struct.unpack("<3i", data[at : at + 12])
        shape = struct.unpack(f"<{count}i", data[at + 12 : at + 12 + 4 * count])[::-1]
        at += 12 + 4 * count + length
        name = data[at - length : at].decode()
        numbers = int(np.prod(shape))
        size = 4 * numbers if kind == 0 else numbers // 32 * 24
        found[name] = torch.from_numpy(_values(data[at : at + size], kind).reshape(shape))
        at += size
    return found


def _values(data: bytes, kind: int) -> np.ndarray:
    if kind == 0:
        return np.frombuffer(data, np.float32).copy()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(np.frombuffer(data, np.uint8).reshape(-1, 24), GGMLQuantizationType.Q5_1)).ravel()


def published(name: str, tensor: Tensor, old: bool) -> tuple[str, Tensor]:
    """The name and form that RWKV's folders have."""
    name = name.replace("emb.", "rwkv.embeddings.").replace("blocks.", "rwkv.blocks.").replace("ln_out", "rwkv.ln_out")
    name = name.replace(".att.", ".attention.").replace(".ffn.", ".feed_forward.").replace("ln0", "pre_ln")
    last = name.rpartition(".")[2]
    if last == "time_faaaa" or (last == "time_decay" and old):
        tensor = tensor[..., 0].T if tensor.dim() == 4 else tensor.reshape(tensor.shape[0], -1)
    if last == "time_decay":
        tensor = (-tensor.log()).log() if old else tensor.reshape(1, 1, -1)
    elif last in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
        tensor = tensor.transpose(-1, -2)
    elif last.startswith("time_m") and tensor.dim() == 1:
        tensor = tensor[None, None]
    if last.startswith("time_mix_"):
        name = name[:-1] + HALF[name[-1]]
    return name, tensor.contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("version", OFF)
def test_logits_are_those_of_another_implementation(version: str, tmp_path: Path) -> None:
    file = next(MODELS.glob(f"tiny-rwkv-{version}-*.bin"), None)
    if file is None:
        pytest.skip("needs the shared models")
    old = version.startswith("5")
    found = dict(published(name, tensor, old) for name, tensor in tensors(file).items())
    key = found["rwkv.blocks.0.feed_forward.key.weight"]
    config: dict[str, Any] = {
        "model_type": "rwkv5" if old else "rwkv6",
        "vocab_size": 256,
        "hidden_size": key.shape[1],
        "intermediate_size": key.shape[0],
        "num_hidden_layers": len({name.split(".")[2] for name in found if ".blocks." in name}),
        "head_size": found["rwkv.blocks.0.attention.time_faaaa"].shape[1],
        "head_size_divisor": 1 if old else 8,  # rwkv.cpp's epsilon for version 5
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    right = np.fromfile(MODELS / f"expected-logits-{version}.bin", np.float32)
    with torch.no_grad():
        logits = load_model(tmp_path)(torch.tensor([PROMPT])).logits[0, -1].numpy()
    package = export(ExportOptions(str(tmp_path)), tmp_path / "package", options=OrtOptions(native=False))
    runner = OrtModel(package.path, threads=1)
    runner.start()
    runner.feed(np.array([PROMPT[:2]]))
    for answer in (logits, runner.feed(np.array([PROMPT[2:]]))[0, -1]):
        assert np.abs(answer - right).max() <= OFF[version] * np.abs(right).max()
        assert answer.argmax() == right.argmax()
