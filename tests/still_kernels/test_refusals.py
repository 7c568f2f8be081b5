"""What no kernel covers, calls that make no sense, and devices without kernels, of all ops."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import torch

from still_graphs.errors import ConfigError, UnsupportedError
from still_kernels.dense_matmul.plan import Variant, tile_table
from still_kernels.plan import Call
from still_kernels.registry import kernels_of

pytest.importorskip("triton")
from tests.still_kernels.test_stateless import DEFINED, FIRST, PLANS, made

ONE = {"B": 1, "T": 1}
EPSILON = {"norm_epsilon": 1e-5}
ROTARY = {"F": 64, "D": 16}
WIDTHS = {"query_width": 32, "key_width": 16, "value_width": 16, "gate_width": 0}
NBITS = {"I": 64, "O": 8, "IW": 8, "IS": 2}
BLOCKS = {"bits": 4, "block_size": 32}
CONV = {"C": 8, "K": 4, "P": 3}
LINEAR = {"HQ": 2, "G": 1, "D": 64, "HK": 2, "H": 4, "V": 32}
ATTENTION = {"H": 4, "HK": 2, "D": 64, "N": 8}
RULE = {"update_rule": "linear", "scale": 0.0}
CHOSEN = {"H": 32, "HK": 2, "D": 128, "N": 640, "S": 128, "block_slots": 128}
CODES = ("codes", "scales")


@pytest.mark.parametrize(
    ("name", "sizes", "attributes", "dtype", "present", "message"),
    [
        ("AddRmsNorm", {"I": 64}, EPSILON, "float32", (),
         "activations are float32; sums with their norms .*kernels for float16, bfloat16."),
        ("Attention", ATTENTION | {"D": 512}, {}, "float16", (), "head_dim=512.*the kernels have"),
        ("Attention", ATTENTION, {}, "float64", (), "dtype=float64.*the kernels have"),
        ("BlockAttention", CHOSEN | {"D": 512}, {}, "float16", (), "head_dim=512"),
        ("BlockAttention", CHOSEN | {"H": 66, "HK": 1}, {}, "float16", (), "66 query heads of a key/value head"),
        ("CausalConv", CONV | {"K": 20}, {"activation": "silu"}, "float16", (), "20 taps.*the kernels have"),
        ("CausalConv", CONV, {"activation": "silu"}, "float64", (), "float64.*the kernels have"),
        ("DenseMatMul", {"I": 64, "O": 8}, EPSILON, "float32", ("weight",),
         "activations are float32; GEMMs with dense weights have kernels for float16, bfloat16."),
        ("DenseMatMul", {"I": 200, "O": 8, "IW": 50, "IS": 1}, EPSILON, "float16", CODES, "I=200 inputs; .* multiples of 16"),
        ("DenseMatMul", {"I": 256, "O": 8, "IW": 64, "IS": 4}, EPSILON, "float16", CODES,
         "scales are 4 for I=256 inputs; .* for each 128 inputs"),
        ("ExpertsNBits", {"I": 64, "block_size": 16}, {"activation": "swiglu", "block_size": 16, "bits": 4}, "float16", (),
         "block_size=16; the kernels have"),
        ("ExpertsNBits", {"I": 64}, {"activation": "swiglu", "block_size": 32, "bits": 2}, "float16", (),
         "bits=2; the kernels have 4 and 8"),
        ("LinearAttention", LINEAR | {"D": 512}, RULE, "float16", (), "head_dim=512.*the kernels have"),
        ("LinearAttention", LINEAR | {"G": 20}, RULE, "float16", (), "20 query heads.*the kernels have"),
        ("LinearAttention", LINEAR, RULE, "float64", (), "float64.*the kernels have"),
        ("LowRankMatMul", {"I": 64, "R": 8, "O": 64}, {}, "float32", (), "activations are float32; .*kernels for float16, bfloat16."),
        ("MatMulNBits", NBITS, BLOCKS, "bfloat16", (), "have kernels for float16"),
        ("MatMulNBits", NBITS, BLOCKS | {"block_size": 16}, "float16", (), "the kernels have multiples of 32"),
        ("RotaryQkv", ROTARY | WIDTHS, WIDTHS, "float32", (), "activations are float32; the rotation .*kernels for float16, bfloat16."),
        ("RoundKeyValue", {"HK": 2, "D": 64}, {}, "float32", (),
         "activations are float32; roundings of keys and values have kernels for float16, bfloat16."),
        ("RoundKeyValue", {"HK": 2, "D": 260}, {}, "float16", (), "head_dim=260; the kernels have at most 256."),
        ("SelectBlocks", CHOSEN, {"block_size": 48}, "float16", (), "block_size=48 beside mean_stride=16"),
        ("SelectBlocks", CHOSEN, {"mean_length": 96}, "float16", (), "mean_length=96"),
        ("SwiGlu", {"width": 64}, {"width": 64}, "float32", (), "activations are float32; gates .*kernels for float16, bfloat16."),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(
    name: str, sizes: dict[str, int], attributes: dict[str, Any], dtype: str, present: tuple[str, ...], message: str
) -> None:
    """What no kernel covers, with what is covered."""
    kernels = kernels_of(name)
    every = {a.name: a.default for a in kernels.spec.attributes} | attributes
    call = Call(ONE | sizes, every, dtype=dtype, count_dtype="int64", present=frozenset(present))
    (reason,) = kernels.refusals(call)
    assert re.search(message, reason)


@pytest.mark.parametrize(
    ("name", "sizes", "attributes", "present", "message"),
    [
        ("DenseMatMul", {"I": 64, "O": 8}, EPSILON, (), "one of weight, turned_weight and codes is wanted"),
        ("LinearAttention", {"E": 3}, {}, ("decay", "beta"), "decay has E=3 values a head; expected 1 or D=64"),
        ("LinearAttention", {"W": 2}, {}, ("decay", "beta"), "beta has W=2 heads; expected 1 or H=4"),
        ("LinearAttention", {"HK": 3}, {}, ("decay", "beta"), "HK=3 key heads do not divide the H=4"),
        ("LinearAttention", {"HQ": 3}, {}, ("decay", "beta"), "HQ=3 query groups do not divide the H=4"),
        ("LinearAttention", {}, {"update_rule": "gated"}, ("beta",), "decay is for gated"),
        ("MatMulNBits", {"IW": 9}, {}, (), "blocks have 9 words for I=64"),
        ("MatMulNBits", {"IS": 3}, {}, (), "scales are 3 for I=64"),
        ("MatMulNBits", {"IZ": 2}, {}, ("zero_points",), "zero_points have 2 words for 2 blocks"),
        ("RotaryQkv", ROTARY, WIDTHS | {"value_width": 8}, (), "32, 16, 8 and 0 are not the input's 64"),
        ("RotaryQkv", ROTARY, WIDTHS | {"query_width": 24, "key_width": 24}, (), "are no heads of an even D=16"),
        ("RotaryQkv", ROTARY, WIDTHS | {"value_width": 0, "gate_width": 16}, (), "must have numbers"),
        ("RotaryQkv", ROTARY, WIDTHS, ("gate_bias",), "a gate_bias or gate_input a gate"),
        ("Route", {}, {"k": 9}, (), "k=9 of 8 experts, 8 of which"),
        ("Route", {}, {"groups": 3}, (), "groups must divide them"),
        ("Route", {}, {"k": 3, "groups": 4}, (), "2 of which"),
        ("SwiGlu", {}, {"width": 0}, (), "width=0: expected numbers"),
    ],
    ids=str,
)  # fmt: skip
def test_calls_that_make_no_sense(
    name: str, sizes: dict[str, int], attributes: dict[str, Any], present: tuple[str, ...], message: str
) -> None:
    """The hosts' check, which sees no tensor."""
    kernels = kernels_of(name)
    start: dict[str, Any] = {
        "LinearAttention": (LINEAR | {"E": 1, "W": 4}, {"update_rule": "gated_delta", "scale": 0.0}),
        "MatMulNBits": (NBITS, BLOCKS),
        "Route": ({"I": 64, "E": 8}, {}),
    }.get(name, ({}, {}))
    every = {a.name: a.default for a in kernels.spec.attributes} | start[1] | attributes
    known = {symbol: every[symbol] for symbol in ("k", *WIDTHS, "width") if symbol in every}
    call = Call(ONE | start[0] | known | sizes, every, dtype="float16", present=frozenset(present))
    with pytest.raises(UnsupportedError, match=message):
        kernels.plan.check(call)


@pytest.mark.parametrize(
    ("sizes", "weight", "message"),
    [
        ({}, (1, 1, 4), "input C=8; a grouped convolution"),
        ({"P": 4}, (8, 1, 4), "K=4 taps need K - 1 columns of state"),
    ],
)
def test_convolutions_that_make_no_sense(sizes: dict[str, int], weight: tuple[int, ...], message: str) -> None:
    call = Call(ONE | CONV | sizes, {"activation": "silu"}, shapes={"weight": weight})
    with pytest.raises(UnsupportedError, match=message):
        kernels_of("CausalConv").plan.check(call)


def test_architectures_without_e4m3_are_named() -> None:
    with pytest.raises(ConfigError, match="sm_86 has no matrix instructions for e4m3"):
        tile_table(Variant(float8=1), 86)


@pytest.mark.parametrize("op", DEFINED)
def test_unknown_device_is_refused(op: str) -> None:
    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        PLANS[op].OP.run(made(op, FIRST[op]))


X = torch.zeros(1, 1, 2, 16)


@pytest.mark.parametrize(
    ("op", "tensors", "settings", "state"),
    [
        ("attention", (X, X, X), {}, (1, 2, 16, 4)),
        ("causal_conv", (torch.zeros(1, 1, 5), torch.zeros(5, 1, 4)), {}, (1, 5, 4)),
        ("linear_attention", (X[:, :, :, None], X, X), {"update_rule": "linear"}, (1, 2, 16, 16)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_device_is_refused_with_a_state(op: str, tensors: Any, settings: Any, state: Any) -> None:
    meaning, call = (import_module(f"still_kernels.{op}.{part}") for part in ("meaning", "call"))
    empty = meaning.AttentionState.empty if op == "attention" else meaning.empty_state
    inputs = meaning.Inputs(*(x.to("meta") for x in tensors), **settings)
    with pytest.raises(UnsupportedError, match="device 'meta'"):
        getattr(call, op)(inputs, empty(*state, device="meta"))
