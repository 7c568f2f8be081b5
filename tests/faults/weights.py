"""Faults of weights: arrays by name, as the graph or PyTorch has them."""

from collections.abc import Callable

import numpy as np

from tests.faults.registry import Random, as_bfloat16, fault, one, two

Weights = dict[str, np.ndarray]
Change = Callable[[Random, np.ndarray], None]


def on(kind: str, rank: int, *words: str) -> Callable[[Change], Change]:
    """A fault of one random weight of `rank` whose name holds one of `words`, all where there are none."""

    def register(change: Change) -> Change:
        def plant(random: Random, weights: Weights) -> bool:
            names = [
                name
                for name, array in weights.items()
                if array.ndim == rank
                and array.dtype.kind == "f"
                and min(array.shape, default=0) > 1
                and (not words or any(word in name for word in words))
            ]
            name = one(random, names)
            if name is None:
                return False
            change(random, weights[name])
            return True

        fault("weights", kind)(plant)
        return change

    return register


def row(random: Random, array: np.ndarray) -> np.ndarray:
    return array[int(random.integers(len(array)))]


@on("a row of a matrix times 1.1", 2, "proj")
@on("a row of o_proj times 1.1", 2, "o_proj", "out_proj")
@on("a row of a feature map times 1.1", 3, "feature_")
def _(random: Random, array: np.ndarray) -> None:
    row(random, array)[...] *= 1.1


@on("a column of a matrix times 1.1", 2, "proj")
@on("a column of down_proj times 1.1", 2, "down_proj")
def _(random: Random, array: np.ndarray) -> None:
    row(random, array.T)[...] *= 1.1


@on("two rows of a matrix exchanged", 2, "proj")
@on("two tokens' embeddings exchanged", 2, "embed", "lm_head")
def _(random: Random, array: np.ndarray) -> None:
    a, b = two(random, len(array))
    array[[a, b]] = array[[b, a]]


@on("two columns of a matrix exchanged", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    a, b = two(random, array.shape[1])
    array[:, [a, b]] = array[:, [b, a]]


@on("a matrix times 1.005", 2, "proj")
@on("a feature map times 1.005", 3, "feature_")
def _(random: Random, array: np.ndarray) -> None:
    array *= 1.005


@on("a matrix times 1.02", 2, "proj")
@on("the vocabulary times 1.02", 2, "embed", "lm_head")
def _(random: Random, array: np.ndarray) -> None:
    array *= 1.02


@on("a weight with the wrong sign", 2)
def _(random: Random, array: np.ndarray) -> None:
    array[tuple(int(random.integers(n)) for n in array.shape)] *= -1


@on("a row of a matrix lost", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    row(random, array)[...] = 0


@on("a block of a row times 1.1", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    part = row(random, array)
    start = int(random.integers(max(1, len(part) // 8))) * 8
    part[start : start + 8] *= 1.1


@on("a matrix rounded to bfloat16", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    array[...] = as_bfloat16(array)


@on("a matrix rounded to half precision", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    array[...] = array.astype(np.float16).astype(array.dtype)


@on("a norm times 1.01", 1, "norm")
def _(random: Random, array: np.ndarray) -> None:
    array *= 1.01


@on("a channel of a norm times 1.1", 1, "norm")
def _(random: Random, array: np.ndarray) -> None:
    array[int(random.integers(len(array)))] *= 1.1


@on("a gate's bias off by 0.05", 1, "bias")
def _(random: Random, array: np.ndarray) -> None:
    array += 0.05


@on("one number of a bias off by 0.05", 1, "bias", "A_log")
@on("a head's decay off by 0.05", 1, "A_log", "dt_bias", "decay")
def _(random: Random, array: np.ndarray) -> None:
    array[int(random.integers(len(array)))] += 0.05


@on("a pair of channels rotated by 0.02", 2, "q_proj", "k_proj", "qkv")
def _(random: Random, array: np.ndarray) -> None:
    side = array.T if array.shape[0] < array.shape[1] else array
    a, b = two(random, len(side))
    cos, sin = np.cos(0.02), np.sin(0.02)
    side[[a, b]] = np.stack([cos * side[a] - sin * side[b], sin * side[a] + cos * side[b]])


@on("two heads' feature maps exchanged", 3, "feature_")
def _(random: Random, array: np.ndarray) -> None:
    a, b = two(random, len(array))
    array[[a, b]] = array[[b, a]]


@on("two taps of a convolution exchanged", 3, "conv")
def _(random: Random, array: np.ndarray) -> None:
    array[..., [0, 1]] = array[..., [1, 0]]


@on("a weight that is no number", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    array[tuple(int(random.integers(n)) for n in array.shape)] = np.nan


@fault("weights", "two layers' norms exchanged")
def _(random: Random, weights: Weights) -> bool:
    names = [n for n in weights if "layernorm" in n and n.endswith("weight")]
    first = one(random, names)
    other = one(random, [n for n in names if n != first and weights[n].shape == weights[first].shape])
    if other is None:
        return False
    weights[first][...], weights[other][...] = weights[other].copy(), weights[first].copy()
    return True


@fault("weights", "gate and up projection exchanged")
def _(random: Random, weights: Weights) -> bool:
    gate = one(random, [n for n in weights if "gate_proj" in n and n.replace("gate_proj", "up_proj") in weights])
    if gate is None:
        return False
    up = gate.replace("gate_proj", "up_proj")
    weights[gate][...], weights[up][...] = weights[up].copy(), weights[gate].copy()
    return True


@fault("weights", "the scale of a quantized block times 1.1")
def _(random: Random, weights: Weights) -> bool:
    name = one(random, [n for n in weights if n.endswith(".scales")])
    if name is None:
        return False
    weights[name].reshape(-1)[int(random.integers(weights[name].size))] *= 1.1
    return True


@fault("weights", "a byte of codes that is not the weight's")
def _(random: Random, weights: Weights) -> bool:
    name = one(random, [n for n in weights if n.endswith((".blocks", ".rows", ".codes"))])
    if name is None:
        return False
    codes = weights[name].reshape(-1)
    codes[int(random.integers(codes.size))] ^= 0x35
    return True
