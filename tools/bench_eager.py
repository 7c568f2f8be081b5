#!/usr/bin/env python3
"""Decode speed of a plain Transformer in PyTorch eager, as people run it today: transformers, its key-value cache, no compilation.

  python tools/bench_eager.py --context 8064 --steps 64

Random weights of SmolLM2-135M's geometry by default; needs torch and transformers alone. `--small` shrinks every size, to try the script
on a CPU. The result is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8064, help="tokens already seen (default 8064)")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    if options.small:
        sizes = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 9}
    config = LlamaConfig(
        vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=16384, **sizes
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    with torch.no_grad(), torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
        cache = DynamicCache()
        ids = torch.randint(0, config.vocab_size, (1, options.context))
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        times = []
        for _ in range(options.steps + 4):
            begin = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            token.cpu()  # a step ends when its token is known
            times.append(time.perf_counter() - begin)
    median = statistics.median(times[4:])
    row = {
        "context": options.context,
        "attention": model.config._attn_implementation,
        "decode_us": round(median * 1e6, 1),
    }
    print(json.dumps({**row, "tokens_per_s": round(1 / median, 1), "torch": torch.__version__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
