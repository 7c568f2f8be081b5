#!/usr/bin/env python3
"""Write a plain model of random bfloat16 weights in shards, tensor by tensor: what the memory of an export is measured with.

  python tools/make_random_model.py llama-1b FOLDER

Needs the disk, not the memory, of the model. There is no tokenizer: packages of it run on token ids.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-1b": dict(  # TinyLlama-1.1B's
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        head_dim=64, vocab_size=32_000, max_position_embeddings=2048,
    ),
    "llama-8b": dict(  # Llama-3.1-8B's
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128_256, max_position_embeddings=131_072, rope_theta=500_000.0,
    ),
}  # fmt: skip
SHARD_BYTES = 1 << 30


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's weights, embeddings not tied."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("q", queries, width),
            ("k", keys, width),
            ("v", keys, width),
            ("o", width, queries),
        ):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, columns)
        for name, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
            yield f"{layer}.mlp.{name}_proj.weight", (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (config["vocab_size"], width)


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    config = dict(GEOMETRIES[given.geometry])
    config |= dict(model_type="llama", architectures=["LlamaForCausalLM"], dtype="bfloat16", tie_word_embeddings=False)
    given.folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        places.update(dict.fromkeys(shards[0], name))
        save_file(shards[0], given.folder / name, metadata={"format": "pt"})
        shards[0] = {}

    for name, shape in shapes(config):
        weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        shards[0][name] = weight.to(torch.bfloat16)
        if sum(t.numel() * 2 for t in shards[0].values()) >= SHARD_BYTES:
            write()
    if shards[0]:
        write()
    (given.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (given.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
