"""Time a step of a small model layer by layer on a GPU: what ONNX Runtime and TensorRT launch beside still::BetweenAttention.

  python -m tools.benchmarks.small_steps --length 1000 --layers 30

Each chain is replayed from a CUDA graph, through layers of SmolLM2-135M's sizes with weights and states of their own: one hybrid attention
step, and what lies between two of them. A chain that is not the first one's result to 5% is not timed. Needs PyTorch and Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels import add_rms_norm, between_attention, dense_matmul, gated_mlp, rotary_qkv, swi_glu
from still_kernels.bench import median_s
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState, Inputs
from still_kernels.hybrid_attention.launch import launch_hybrid_attention
from still_kernels.work import filled, relative_error

HEADS, KV_HEADS, DIM, WIDTH, MIDDLE, EPSILON = 9, 3, 64, 576, 1536, 1e-5
KEYS = KV_HEADS * DIM
CONFIG = HybridAttentionConfig(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, salient_per_chunk=16, select_scope="kv_group_max", capacity_tokens=9216
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Weights as graphs have them, and a state."""

    output: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor
    next_norm: Tensor
    next: Tensor
    gate: Tensor
    merged: Tensor
    bias: Tensor
    features: tuple[Tensor, Tensor]
    state: HybridAttentionState


def drawn(*shape: int) -> Tensor:
    """Random numbers; of a weight of two or more axes outputs are of the size of inputs."""
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    return (torch.randn(shape, device="cuda") * scale).half()


def layer_of(length: int) -> Layer:
    """A layer whose state holds `length` tokens."""
    state = HybridAttentionState.empty(CONFIG, 1, torch.float16, "cuda")
    state.length.fill_(length)
    following, gate = drawn(WIDTH, WIDTH + 2 * KEYS), drawn(WIDTH, WIDTH)
    return Layer(
        drawn(WIDTH, WIDTH),
        drawn(WIDTH),
        drawn(WIDTH, 2 * MIDDLE),
        drawn(MIDDLE, WIDTH),
        drawn(WIDTH),
        following,
        gate,
        torch.cat([following, gate], 1),
        drawn(WIDTH),
        (drawn(HEADS, DIM, DIM), drawn(HEADS, DIM, DIM)),
        filled(state, torch.Generator("cuda").manual_seed(1)),
    )


def by_cublas(layer: Layer, attention: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ONNX Runtime's CUDA provider: eight launches, and those that share the inputs of a GEMM."""
    x, rows = add_rms_norm.OP(add_rms_norm.Inputs(attention @ layer.output, x, layer.norm, EPSILON))
    middle = swi_glu.OP(swi_glu.Inputs(rows @ layer.gate_up, MIDDLE))
    x, rows = add_rms_norm.OP(add_rms_norm.Inputs(middle @ layer.down, x, layer.next_norm, EPSILON))
    return x, rows @ layer.next, rows @ layer.gate


def by_our_gemms(layer: Layer, attention: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """As TensorRT's plugins: four launches, or five."""
    x = dense_matmul.OP(dense_matmul.Inputs(attention, layer.output, residual=x))
    x = gated_mlp.OP(gated_mlp.Inputs(x, layer.norm, layer.down, layer.gate_up, EPSILON))
    both = dense_matmul.OP(dense_matmul.Inputs(x, layer.merged, norm_weight=layer.next_norm, norm_epsilon=EPSILON))
    return x, both, None


def in_one_launch(layer: Layer, attention: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """By the op."""
    weights = layer.output, layer.norm, layer.down, layer.gate_up, layer.next_norm, layer.next, layer.gate
    x, following, gate = between_attention.OP(between_attention.Inputs(attention, x, *weights, EPSILON, WIDTH))
    return x, following, gate


Form = Callable[[Layer, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
FORMS: dict[str, Form] = {"cuBLAS": by_cublas, "our GEMMs": by_our_gemms, "one launch": in_one_launch}


def first_inputs() -> list[Tensor]:
    """Attention and numbers of a token, key, value and gate; cosine and sine; one token."""
    angle = torch.linspace(0, 3, DIM // 2, device="cuda").repeat(1, 1, 2)
    numbers = [drawn(1, 1, n) for n in (WIDTH, WIDTH, KEYS, KEYS, WIDTH)]
    return [*numbers, angle.cos().half(), angle.sin().half(), torch.ones(1, dtype=torch.int64, device="cuda")]


def chain(layers: list[Layer], form: Form | None, attends: bool, given: list[Tensor]) -> Tensor:
    """Through all layers; without a `form` attention alone, without attention a layer's queries in its place."""
    attention, x, key, value, gate, cos, sin, one = given
    for layer in layers:
        if form is not None:
            x, whole, beside = form(layer, attention, x)
            turned = rotary_qkv.Inputs(whole, cos, sin, WIDTH, KEYS, KEYS, WIDTH, layer.bias, beside)
            attention, key, value, gate = rotary_qkv.OP(turned)
        if attends:
            query, *others = (each.view(1, 1, -1, DIM) for each in (attention, key, value, gate))
            output = torch.empty_like(query)
            read = Inputs(query, others[0], others[1], others[2], *layer.features, one)
            launch_hybrid_attention(read, CONFIG, layer.state, output)
            attention = output.view(1, 1, WIDTH)
    return torch.cat([attention, x], -1)


def main() -> int:
    """Print microseconds of a layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1000, help="tokens of the states (default: 1000)")
    parser.add_argument("--layers", type=int, default=30, help="layers of a chain (default: 30)")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = [layer_of(options.length) for _ in range(options.layers)]
    given = first_inputs()
    print(torch.cuda.get_device_name())
    expected: dict[bool, Tensor] = {}
    for name, form in [("attention alone", None), *FORMS.items()]:
        for attends in (True, False) if form else (True,):
            found = chain(layers, form, attends, given)
            if form and relative_error(found, expected.setdefault(attends, found)) > 5e-2:
                print(f"{name}: not the result of the first form")
                continue
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain(layers, form, attends, given)
            us = 1e6 * median_s(graph.replay) / options.layers
            print(f"{us:7.2f} us a layer  {name}{'' if attends else ', without attention'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
