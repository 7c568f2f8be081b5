#!/usr/bin/env python3
"""The baseline of the TensorRT speed targets: full attention in PyTorch, cuDNN attention, CUDA graph, Llama-3.1-8B geometry.

  python tools/bench_full_attention.py --layers 4 --context 65536 --batch 1,8

Some layers and a small vocabulary stand for the model: a step costs layers x layer + head (`head_us`). Needs PyTorch alone. `--small`
shrinks every size, to try the script on a CPU. Results are JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model."""

    layers: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocabulary: int = 32000


class Model:
    """Random weights; keys and values of `context` tokens are there already."""

    def __init__(self, size: Geometry, batch: int, device: str, dtype: torch.dtype) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype) * 0.02

        self.size = size
        wide = (size.heads + 2 * size.kv_heads) * size.dim
        self.layers = [
            {
                "qkv": weight(wide, size.hidden),
                "out": weight(size.hidden, size.heads * size.dim),
                "gate_up": weight(2 * size.inner, size.hidden),
                "down": weight(size.hidden, size.inner),
            }
            for _ in range(size.layers)
        ]
        self.norm = torch.ones(size.hidden, device=device, dtype=dtype)
        self.embedding, self.head = weight(size.vocabulary, size.hidden), weight(size.vocabulary, size.hidden)
        shape = (batch, size.kv_heads, size.context, size.dim)
        self.cache = [[torch.randn(shape, device=device, dtype=dtype) for _ in "kv"] for _ in range(size.layers)]
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.cos = torch.ones(1, size.dim, device=device, dtype=dtype)
        self.sin = torch.zeros(1, size.dim, device=device, dtype=dtype)

    def step(self) -> Tensor:
        """One decode step at the last position."""
        size, x = self.size, self.embedding[self.ids]
        batch = x.shape[0]
        for weights, (keys, values) in zip(self.layers, self.cache, strict=True):
            hidden = F.rms_norm(x, (size.hidden,), self.norm, 1e-5)
            parts = [size.heads * size.dim, size.kv_heads * size.dim, size.kv_heads * size.dim]
            q, k, v = (
                y.view(batch, 1, -1, size.dim).transpose(1, 2) for y in (hidden @ weights["qkv"].T).split(parts, -1)
            )
            q, k = self._turn(q), self._turn(k)
            keys[:, :, -1:], values[:, :, -1:] = k, v
            mixed = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            x = x + mixed.transpose(1, 2).reshape(batch, 1, -1) @ weights["out"].T
            x = x + self._mlp(x, weights)
        return x @ self.head.T

    def _mlp(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        gate, up = (F.rms_norm(x, (self.size.hidden,), self.norm, 1e-5) @ weights["gate_up"].T).chunk(2, -1)
        return (F.silu(gate) * up) @ weights["down"].T

    def _turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin

    def rest_of_prefill(self, x: Tensor) -> Tensor:
        """A layer without its attention, for a call of many tokens."""
        weights = self.layers[0]
        wide = F.rms_norm(x, (self.size.hidden,), self.norm, 1e-5) @ weights["qkv"].T
        x = x + wide[:, : self.size.heads * self.size.dim] @ weights["out"].T
        return x + self._mlp(x, weights)


def timed(work: Callable[[], object], count: int, device: str) -> float:
    """Seconds of one `work`, replayed from a CUDA graph on a GPU."""
    if device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
        work()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--call", type=int, default=2048, help="tokens of a prefill call (default 2048)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    size = Geometry(options.layers, options.context)
    if options.small:
        size = Geometry(options.layers, options.context, 4, 2, 16, 64, 96, 50)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
    with torch.no_grad():
        for backend in backends:
            for batch in map(int, options.batch.split(",")):
                row = {"attention": backend.name, "batch": batch, "layers": size.layers, "context": size.context}
                try:
                    model = Model(size, batch, device, dtype)
                    with sdpa_kernel(backend):
                        row["decode_us"] = round(timed(model.step, 50, device) * 1e6, 1)
                    x = model.embedding[model.ids]
                    row["head_us"] = round(timed(lambda: x @ model.head.T, 50, device) * 1e6, 1)  # noqa: B023
                except RuntimeError as error:  # a backend may refuse a shape; the other one is measured all the same
                    row["failed"] = str(error)[:200]
                print(json.dumps(row), flush=True)
        model = Model(size, 1, device, dtype)
        q = torch.randn(1, size.heads, size.context, size.dim, device=device, dtype=dtype)
        k, v = (torch.randn_like(q) for _ in "kv")
        with sdpa_kernel(backends[0]):
            whole = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3, device)
        x = torch.randn(options.call, size.hidden, device=device, dtype=dtype)
        rest = timed(lambda: model.rest_of_prefill(x), 20, device) * size.context / options.call
        row = {"prefill_tokens": size.context, "attention_ms": round(whole * 1e3, 2), "rest_ms": round(rest * 1e3, 2)}
        print(json.dumps({**row, "of": "one layer"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
