"""A million tokens through Llama-3.1-8B's geometry as a STILL model in PyTorch: prefill in calls, memory, decode; floors; full attention.

  python -m tools.benchmarks.million_tokens --tokens 1048576 --call 16384 --peer 262144

Random weights in bfloat16, made on the GPU. Prefill's time is told after each doubling of `--call`. Decode is a CUDA graph of a step,
replayed; every 64th step promotes. The floor is the slower of bytes at the rate of a large copy and FLOP at that of a large GEMM, both
measured first: weights and states once for a step, products of weights and of attention for a prompt. Full attention at `--peer` tokens is
cuDNN's for one layer and that layer's rest, times the layers; its step is that of two layers after `--tokens`, without a head; its cache in
bytes is told, for it need not fit. `--small` shrinks every size, to try it on a CPU.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from still_export.mixers.cache import StillCache
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import Deployment
from still_export.models import attach_untrained
from tools.benchmarks.common import Findings, in_blocks, parser_of, replayed, time_calls
from tools.benchmarks.full_attention import Model, seconds, sizes_of
from tools.benchmarks.geometries import LLAMA_8B
from tools.benchmarks.torch_generate import base_model
from tools.kernels.bench import Ceilings, measure_ceilings
from tools.kernels.ops.hybrid_attention import decode_cost, prefill_cost

ROOM = 256
"""Tokens of decode that the cache has room for."""


def gib(count: float) -> float:
    """Bytes in GiB."""
    return round(count / 2**30, 2)


class Floors:
    """Least seconds of a model's calls at the machine's rates."""

    def __init__(self, model: Any, ceilings: Ceilings) -> None:
        config = model.config
        self.layer = config.still.layer_config(config, 0, config.still.deployment)
        self.layers, self.ceilings = config.num_hidden_layers, ceilings
        self.head = model.lm_head.weight.numel()
        self.body = sum(x.numel() for x in model.model.layers.parameters())
        self.weight_bytes = (self.body + self.head) * model.lm_head.weight.element_size()

    def prefill_s(self, tokens: int) -> float:
        """Of so many tokens, logits of the last."""
        _, flop = prefill_cost(self.layer, tokens)
        return self.ceilings.floor_s(self.weight_bytes, 2.0 * self.body * tokens + self.layers * flop)

    def step_s(self, context: int) -> float:
        """Of a token behind so many."""
        moved, flop = decode_cost(self.layer, context, 1)
        return self.ceilings.floor_s(
            self.weight_bytes + self.layers * moved, 2.0 * (self.body + self.head) + self.layers * flop
        )


def still_rows(model: Any, floors: Floors, tokens: int, call: int, steps: int, found: Findings) -> None:
    """Prefill and decode of the STILL model."""
    device, cuda = model.device, model.device.type == "cuda"
    waits = torch.cuda.synchronize if cuda else lambda: None
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(2)).to(device)
    made = lambda: StillCache.static(model.config, 1, tokens + ROOM, model.dtype, device)  # noqa: E731
    cache = made()
    states = sum(x.nbytes for layer in cache.layers for x in layer.state.tensors().values())  # type: ignore[attr-defined]

    def feed(begin: int, end: int) -> None:
        model(ids[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
        waits()

    feed(0, call)  # compiles
    cache.reset()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    spent, done, mark = 0.0, 0, call
    while done < tokens:
        end = min(done + call, tokens)
        spent += time_calls(lambda: feed(done, end), 1, 0).median  # noqa: B023
        done = end
        if done == mark or done == tokens:
            floor = floors.prefill_s(done)
            found.add(prefill=done, seconds=round(spent, 3), floor_s=round(floor, 3), share=round(floor / spent, 3))
            mark *= 2
    if cuda:
        found.add(
            peak_gib=gib(torch.cuda.max_memory_allocated()),
            weights_gib=gib(floors.weight_bytes),
            states_gib=gib(states),
        )
    token = ids[:, -1:]

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True)

    work, how = step, "eager"
    if cuda:
        try:
            work, how = replayed(step), "CUDA graph"  # type: ignore[assignment]
        except RuntimeError as error:
            print(f"no CUDA graph of a step, which is timed eager: {error}", flush=True)
    block = in_blocks(work, 1, waits)
    times = time_calls(block, steps, 2)
    floor = floors.step_s(tokens)
    found.add(
        decode_after=tokens, how=how, **times.figures("ms"), mean_ms=round(sum(times.seconds) / steps * 1e3, 4),
        floor_ms=round(floor * 1e3, 3), share=round(floor / times.median, 3),
    )  # fmt: skip


def peer_rows(
    tokens: int, peer: int, call: int, layers: int, small: bool, device: str, dtype: Any, found: Findings
) -> None:
    """Full attention: its cache in bytes, a step after `tokens`, a prompt of `peer`."""
    size = sizes_of(2, tokens, small)
    per_token = 2 * size.kv_heads * size.dim * dtype.itemsize * layers
    row = {
        "full_attention": "PyTorch",
        "cache_gib_of_tokens": gib(per_token * tokens),
        "cache_gib_of_peer": gib(per_token * peer),
    }
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
    model = Model(size, 1, device, dtype)
    x = model.embedding[model.ids]
    head = seconds(lambda: x @ model.head.T, 3, device)
    for backend in backends:
        try:
            with sdpa_kernel(backend):
                layer = (seconds(model.step, 3, device) - head) / 2
        except RuntimeError as error:  # a backend may refuse a shape
            found.add(**row, backend=backend.name, failed=str(error)[:200])
            continue
        found.add(
            **row,
            backend=backend.name,
            decode_after=tokens,
            layer_ms=round(layer * 1e3, 4),
            layers_ms=round(layer * layers * 1e3, 3),
        )
    model.cache.clear()
    q = torch.randn(1, size.heads, peer, size.dim, device=device, dtype=dtype)
    k, v = (torch.randn_like(q) for _ in "kv")
    run = in_blocks(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        1,
        torch.cuda.synchronize if device == "cuda" else lambda: None,
    )
    with sdpa_kernel(backends[0]):
        whole = time_calls(run, 3).median
    x = torch.randn(call, size.hidden, device=device, dtype=dtype)
    rest = seconds(lambda: model.rest_of_prefill(x), 4, device) * peer / call
    found.add(
        full_attention="prompt", tokens=peer, attention_ms=round(whole * 1e3, 2), rest_ms=round(rest * 1e3, 2),
        all_layers_s=round(layers * (whole + rest), 3),
    )  # fmt: skip


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--call", type=int, default=16384, help="tokens of a prefill call (default 16384)")
    parser.add_argument("--peer", type=int, default=1 << 18, help="tokens of full attention's prompt; 0: nothing of it")
    parser.add_argument("--layers", type=int, help="fewer than the geometry has")
    parser.add_argument("--steps", type=int, default=128, help="of decode, at most 200")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = Findings()
    ceilings = measure_ceilings(dtype) if device == "cuda" else Ceilings(1e10, 1e11)
    found.add(copy_tb_s=round(ceilings.copy / 1e12, 3), gemm_tflop_s=round(ceilings.gemm / 1e12, 1), device=device)
    with torch.no_grad():
        torch.set_default_dtype(dtype)
        base = base_model(options.small, LLAMA_8B, options.layers, device)
        room = StillConfig(deployment=Deployment(capacity_tokens=options.tokens + ROOM))
        model = attach_untrained(base, room).requires_grad_(False).to(device, dtype)
        torch.set_default_dtype(torch.float32)
        layers = model.config.num_hidden_layers
        still_rows(model, Floors(model, ceilings), options.tokens, options.call, options.steps, found)
        del base, model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if options.peer:
            peer_rows(
                options.tokens,
                options.peer,
                min(options.call, options.peer),
                layers,
                options.small,
                device,
                dtype,
                found,
            )
    found.record(options.record, "a million tokens", {"geometry": LLAMA_8B, "dtype": str(dtype)[6:]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
