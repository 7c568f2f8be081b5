"""Turn pickled checkpoints into safetensors: python -m still_export.models.read.unpickle FILE.pt [OUT.safetensors]

A folder stands for all pickles of a model in it (pytorch_model*.bin); each becomes a file of the same name. LoLCATs publishes its feature
maps and adapters as `model.pt`. The restricted unpickler is used, which builds tensors and containers and calls nothing else; a file that
needs more is refused.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from still_export.errors import CheckpointError, StillExportError
from still_export.folders.weights import SAFE
from still_export.package.refusals import first_line

CONTAINERS = ("model_state_dict", "state_dict", "model", "module")
"""Names of the state dict among others; DeepSpeed's is "module"."""


def unpickle(source: Path, target: Path) -> int:
    """Write the tensors of a pickled state dict as safetensors; returns how many.

    Raises:
        CheckpointError: The file has more than tensors, is damaged, or is no state dict.
    """
    try:
        values: Any = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its own text advises to let the file run code
        raise CheckpointError(
            f"{source} is no file of plain tensors: it is damaged, or wants to run code, which is refused."
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{source} cannot be read as plain tensors: {first_line(error)}. Fetch it again."
        ) from error
    for name in CONTAINERS:
        if isinstance(values, dict) and isinstance(values.get(name), dict):
            values = values[name]
    tensors = (
        {n: t.contiguous().clone() for n, t in values.items() if isinstance(t, Tensor)}
        if isinstance(values, dict)
        else {}
    )
    if not tensors:
        raise CheckpointError(f"{source} holds no tensors by name. Give the file with the model's state dict.")
    save_file(tensors, target, metadata={"format": "pt"})
    return len(tensors)


def main(arguments: list[str]) -> int:
    """Command line: one or two paths. Returns the exit code."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(arguments[0])
    sources = sorted(source.glob("pytorch_model*.bin")) if source.is_dir() else [source]
    targets = [Path(arguments[1])] if arguments[1:] else [path.with_suffix(SAFE) for path in sources]
    try:
        if len(sources) != len(targets) or not sources:
            raise CheckpointError(
                f"{source} has {len(sources)} files pytorch_model*.bin. Give one file, or a folder without a target."
            )
        for one, target in zip(sources, targets, strict=True):
            print(f"{unpickle(one, target)} tensors in {target}")
    except StillExportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
