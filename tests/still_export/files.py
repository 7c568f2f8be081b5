"""Changes of the files of a model's folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

ADAPTER = "adapter_model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**read_json(path), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Those of its one file, in place."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A folder as PEFT writes it."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / ADAPTER)
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "r": 2, **config}))
    return folder
