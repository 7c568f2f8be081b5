"""Write GGUF files of a published shape with random weights, by llama.cpp's converter and quantizer: both runtimes take them.

  python -m tools.benchmarks.random_gguf lfm2-1.2b FOLDER --converter llama.cpp --types Q4_K_M,Q8_0

Needs llama-cpp-python, and a checkout of llama.cpp for its convert_hf_to_gguf.py and gguf-py. Writes FOLDER/GEOMETRY.TYPE.gguf; what lies
between, a bfloat16 model twice, is deleted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.benchmarks import random_model
from tools.benchmarks.geometries import GEOMETRIES

TYPES = {"Q8_0": 7, "Q4_K_M": 15}
"""Names of llama.cpp's quantizations, and its numbers of them."""
TEXT = ["The quick brown fox jumps over the lazy dog.", "def f(x):\n    return x + 1\n"] * 20
PUBLISHED = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of Granite's layers: transformers' names, and those of the published files, which the converter knows."""
CONVERT = """
import runpy, sys
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # by a hash of published vocabularies
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_tokenizer(folder: Path) -> None:
    """One of bytes, with as many tokens as the model has: prompts are token ids, and every answer has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    found = json.loads(made.to_str())
    known = found["model"]["vocab"]
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    known.update({f"w{number}": number for number in range(len(known), size)})
    made = Tokenizer.from_str(json.dumps(found))
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    whole.save_pretrained(folder)


def name_layers(folder: Path) -> None:
    """Have the configuration name its layers as published files do."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [PUBLISHED.get(kind, kind) for kind in config["layer_types"]]
        path.write_text(json.dumps(config, indent=1))


def convert(folder: Path, converter: Path, target: Path) -> None:
    """A GGUF file in bfloat16 of a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(converter), str(converter / "gguf-py")])}
    command = [sys.executable, "-c", CONVERT, str(converter / "convert_hf_to_gguf.py"), str(folder)]
    command += ["--outfile", str(target), "--outtype", "bf16"]
    if "qwen3_5" in (folder / "config.json").read_text():
        command.append("--no-mtp")
    subprocess.run(command, env=environment, check=True)


def quantize(source: Path, target: Path, kind: str, threads: int) -> None:
    """A GGUF file by llama.cpp's quantizer."""
    import llama_cpp

    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype, asked.nthread = TYPES[kind], threads
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(asked)):
        raise SystemExit(f"llama.cpp cannot write {source} as {kind}; what it said is above.")


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--converter", type=Path, required=True, help="checkout of llama.cpp")
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(TYPES), help="of Q4_K_M, Q8_0")
    parser.add_argument("--layers", type=int, help="Layers, for a first try; the geometry's own otherwise.")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args(arguments)
    if unknown := set(given.types) - set(TYPES):
        parser.error(f"--types {','.join(sorted(unknown))}: there are {', '.join(TYPES)}.")
    given.folder.mkdir(parents=True, exist_ok=True)
    model, whole = given.folder / given.geometry, given.folder / f"{given.geometry}.bf16.gguf"
    random_model.main(
        [given.geometry, str(model), "--repeat", *(["--layers", str(given.layers)] if given.layers else [])]
    )
    write_tokenizer(model)
    name_layers(model)
    convert(model, given.converter.resolve(), whole)
    shutil.rmtree(model)
    for kind in given.types:
        quantize(whole, given.folder / f"{given.geometry}.{kind}.gguf", kind, given.threads)
    whole.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
