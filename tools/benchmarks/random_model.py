"""Write a plain model of random bfloat16 weights in shards, tensor by tensor: what the memory of an export is measured with.

  python -m tools.benchmarks.random_model llama-1b FOLDER
  python -m tools.benchmarks.random_model llama-8b FOLDER --sparse

Needs the disk, not the memory, of the model; with --sparse (Linux, fallocate) a 32nd of the disk. There is no tokenizer: packages of it
run on token ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tools.benchmarks.geometries import GEOMETRIES, config_of

SHARD_BYTES = 1 << 30
SPARSE = 32
"""With --sparse one in so many of a matrix's numbers is random, the first ones; the others are zeros that the disk does not store."""


def shapes(config: PreTrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the model's weights, of tied ones the first."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def values(shape: tuple[int, ...], generator: torch.Generator, part: int) -> torch.Tensor:
    """Ones for a vector, else random numbers, of which one in `part` is not zero."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    flat = weight.view(-1)[: weight.numel() // part]
    flat.copy_(torch.randn(len(flat), generator=generator) * 0.02)
    return weight


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="Layers, for a first try; the geometry's own otherwise.")
    parser.add_argument("--sparse", action="store_true", help="Mostly zeros, in files with holes.")
    given = parser.parse_args(arguments)
    changed = {"num_hidden_layers": given.layers} if given.layers else {}
    config = config_of(given.geometry, dtype="bfloat16", **changed)
    given.folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        places.update(dict.fromkeys(shards[0], name))
        save_file(shards[0], given.folder / name, metadata={"format": "pt"})
        if given.sparse:
            subprocess.run(["fallocate", "--dig-holes", str(given.folder / name)], check=True)
        shards[0] = {}

    for name, shape in shapes(config):
        shards[0][name] = values(shape, generator, SPARSE if given.sparse else 1)
        if sum(t.numel() * 2 for t in shards[0].values()) >= SHARD_BYTES:
            write()
    if shards[0]:
        write()
    (given.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config.save_pretrained(given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
