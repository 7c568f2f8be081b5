"""The peer of the speed targets on a GPU: full attention in PyTorch (cuDNN and flash attention), a CUDA graph, Llama-3.1-8B's geometry.

  python -m tools.benchmarks.full_attention --layers 4 --context 65536 --batch 1,8

Some layers and a small vocabulary stand for the model: a step costs layers x layer + head (`head_us`). Needs PyTorch. `--small` shrinks
every size, to try it on a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmarks.common import Call, Findings, in_blocks, numbers, parser_of, replayed, time_calls
from tools.benchmarks.geometries import GEOMETRIES, LLAMA_8B

VOCABULARY = 32000


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    layers: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    vocabulary: int = VOCABULARY


def sizes_of(layers: int, context: int, small: bool) -> Sizes:
    """Of Llama-3.1-8B, or tiny ones."""
    if small:
        return Sizes(layers, context, 4, 2, 16, 64, 96, 50)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size")
    return Sizes(layers, context, *(GEOMETRIES[LLAMA_8B][name] for name in names))


class Model:
    """Random weights; keys and values of `context` tokens are there already."""

    def __init__(self, size: Sizes, batch: int, device: str, dtype: torch.dtype) -> None:
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


def seconds(work: Call, count: int, device: str) -> float:
    """Of one `work`, replayed from a CUDA graph on a GPU: the median of five blocks."""
    cuda = device == "cuda"
    block = in_blocks(replayed(work) if cuda else work, count, torch.cuda.synchronize if cuda else lambda: None)
    return time_calls(block, 5).median / count


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--call", type=int, default=2048, help="tokens of a prefill call (default 2048)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    size, found = sizes_of(options.layers, options.context, options.small), Findings()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
    with torch.no_grad():
        for backend in backends:
            for batch in numbers(options.batch):
                row = {"attention": backend.name, "batch": batch, "layers": size.layers, "context": size.context}
                try:
                    model = Model(size, batch, device, dtype)
                    with sdpa_kernel(backend):
                        row["decode_us"] = round(seconds(model.step, 10, device) * 1e6, 1)
                    x = model.embedding[model.ids]
                    row["head_us"] = round(seconds(lambda: x @ model.head.T, 10, device) * 1e6, 1)  # noqa: B023
                except RuntimeError as error:  # a backend may refuse a shape; the other one is measured all the same
                    row["failed"] = str(error)[:200]
                found.add(**row)
        model = Model(size, 1, device, dtype)
        q = torch.randn(1, size.heads, size.context, size.dim, device=device, dtype=dtype)
        k, v = (torch.randn_like(q) for _ in "kv")
        with sdpa_kernel(backends[0]):
            whole = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, device)
        x = torch.randn(options.call, size.hidden, device=device, dtype=dtype)
        rest = seconds(lambda: model.rest_of_prefill(x), 4, device) * size.context / options.call
        row = {"prefill_tokens": size.context, "attention_ms": round(whole * 1e3, 2), "rest_ms": round(rest * 1e3, 2)}
        found.add(**row, of="one layer")
    found.record(options.record, "full attention, PyTorch", {"geometry": LLAMA_8B, "dtype": str(dtype)[6:]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
