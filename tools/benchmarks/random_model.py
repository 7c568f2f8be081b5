"""Write a plain model of random bfloat16 weights in shards, tensor by tensor: what the memory of an export is measured with.

  python -m tools.benchmarks.random_model llama-1b FOLDER
  python -m tools.benchmarks.random_model llama-8b FOLDER --sparse

Needs the disk, not the memory, of the model; with --sparse a 32nd of the disk, and seconds; with --repeat no time to draw. There is no
tokenizer: packages of it run on token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from tools.benchmarks.geometries import GEOMETRIES, config_of

SHARD_BYTES = 1 << 30
PIECE = 1 << 24
"""Numbers that are drawn at once."""
SPARSE = 32
"""With --sparse one in so many of a matrix's numbers is random, the first ones; the others are zeros that the disk does not store."""

PUBLISHED = [
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
]
"""Names in transformers' Granite, and in its published files."""


def shapes(config: PreTrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, as files have them, and shapes of the model's weights, of tied ones the first."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        yield next((name.replace(*pair) for pair in PUBLISHED if pair[0] in name), name), tuple(parameter.shape)


def drawn(generator: torch.Generator, count: int) -> torch.Tensor:
    """Random bfloat16 numbers of weight scale."""
    return (torch.randn(count, generator=generator) * 0.02).bfloat16()


def drawn_once(generator: torch.Generator) -> Callable[[int], torch.Tensor]:
    """Draws of up to PIECE of the same random bfloat16 numbers, each from another place on: no two rows of a matrix are alike."""
    period = PIECE - 3
    numbers = drawn(generator, period).repeat(3)
    place = 0

    def draw(count: int) -> torch.Tensor:
        nonlocal place
        found = numbers[place : place + count]
        place = (place + count + 12_345) % period
        return found

    return draw


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], draw: Callable[[int], torch.Tensor], part: int) -> None:
    """A safetensors file: ones for vectors, else bfloat16 numbers that `draw` gives, one in `part` of a tensor; the others are a hole,
    zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        for name, shape in shapes.items():
            file.seek(first + header[name]["data_offsets"][0])
            count = math.prod(shape) // (part if len(shape) > 1 else 1)
            for start in range(0, count, PIECE):
                size = min(PIECE, count - start)
                part_of = torch.ones(size, dtype=torch.bfloat16) if len(shape) == 1 else draw(size)
                file.write(part_of.view(torch.int16).numpy().data)
        file.truncate(first + end)


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="Layers, for a first try; the geometry's own otherwise.")
    parser.add_argument("--sparse", action="store_true", help="Mostly zeros, in files with holes.")
    parser.add_argument("--repeat", action="store_true", help="Few random numbers, repeated.")
    given = parser.parse_args(arguments)
    changed: dict[str, Any] = {}
    if given.layers:
        kinds = GEOMETRIES[given.geometry].get("layer_types")
        changed = {"num_hidden_layers": given.layers} | ({"layer_types": kinds[: given.layers]} if kinds else {})
    config = config_of(given.geometry, dtype="bfloat16", **changed)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]  # which llama.cpp's converter needs
    given.folder.mkdir(parents=True)
    generator, part = torch.Generator().manual_seed(0), SPARSE if given.sparse else 1
    draw = drawn_once(generator) if given.repeat else partial(drawn, generator)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(config):
        if sum(2 * math.prod(each) for each in shards[-1].values()) >= SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        places.update(dict.fromkeys(shard, f"model-{number:05d}.safetensors"))
        write(given.folder / places[next(iter(shard))], shard, draw, part)
    (given.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config.save_pretrained(given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
