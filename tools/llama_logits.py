"""llama.cpp's opinion on GGUF files: the largest difference between its logits and those of the model that is read here, in PyTorch.

python -m tools.llama_logits FILE.gguf ...     needs llama-cpp-python; 70 random tokens, float32, whole key/value caches
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np
import torch

from still_export.models.load import load_model

TOKENS = 70


def compare(path: Path) -> tuple[float, float]:
    """The largest difference of logits, in shares of the largest, and the share of tokens whose likeliest next is the same."""
    model = load_model(path).float()
    tokens = np.random.default_rng(0).integers(3, model.config.get_text_config().vocab_size, TOKENS)
    with torch.no_grad():
        ours = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    other = llama_cpp.Llama(
        str(path), n_ctx=2 * TOKENS, n_batch=2 * TOKENS, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    other.eval(tokens.tolist())
    theirs = np.array(other.scores[:TOKENS])
    same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max()), same


if __name__ == "__main__":
    for name in sys.argv[1:]:
        difference, same = compare(Path(name))
        print(f"{name}: {difference:.1e} of the largest logit, the likeliest token the same in {same:.0%}", flush=True)
