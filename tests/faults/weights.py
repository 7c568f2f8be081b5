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


def times(factor: float, places: Callable[[Random, np.ndarray], np.ndarray] = lambda _, array: array) -> Change:
    def change(random: Random, array: np.ndarray) -> None:
        places(random, array)[...] *= factor

    return change


def column(random: Random, array: np.ndarray) -> np.ndarray:
    return row(random, array.T)


def block(random: Random, array: np.ndarray) -> np.ndarray:
    part = row(random, array)
    start = int(random.integers(max(1, len(part) // 8))) * 8
    return part[start : start + 8]


def channel(random: Random, array: np.ndarray) -> np.ndarray:
    number = int(random.integers(len(array)))
    return array[number : number + 1]


def exchange_rows(random: Random, array: np.ndarray) -> None:
    a, b = two(random, len(array))
    array[[a, b]] = array[[b, a]]


on("a row of a matrix times 1.1", 2, "proj")(times(1.1, row))
on("a row of o_proj times 1.1", 2, "o_proj", "out_proj")(times(1.1, row))
on("a row of a feature map times 1.1", 3, "feature_")(times(1.1, row))
on("a column of a matrix times 1.1", 2, "proj")(times(1.1, column))
on("a column of down_proj times 1.1", 2, "down_proj")(times(1.1, column))
on("a block of a row times 1.1", 2, "proj")(times(1.1, block))
on("a matrix times 1.005", 2, "proj")(times(1.005))
on("a feature map times 1.005", 3, "feature_")(times(1.005))
on("a matrix times 1.02", 2, "proj")(times(1.02))
on("the vocabulary times 1.02", 2, "embed", "lm_head")(times(1.02))
on("a norm times 1.01", 1, "norm")(times(1.01))
on("a channel of a norm times 1.1", 1, "norm")(times(1.1, channel))
on("a row of a matrix lost", 2, "proj")(times(0, row))
on("two rows of a matrix exchanged", 2, "proj")(exchange_rows)
on("two tokens' embeddings exchanged", 2, "embed", "lm_head")(exchange_rows)
on("two heads' feature maps exchanged", 3, "feature_")(exchange_rows)
on("two columns of a matrix exchanged", 2, "proj")(lambda random, array: exchange_rows(random, array.T))


@on("a weight with the wrong sign", 2)
def _(random: Random, array: np.ndarray) -> None:
    array[tuple(int(random.integers(n)) for n in array.shape)] *= -1


@on("a weight that is no number", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    array[tuple(int(random.integers(n)) for n in array.shape)] = np.nan


@on("a matrix rounded to bfloat16", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    array[...] = as_bfloat16(array)


@on("a matrix rounded to half precision", 2, "proj")
def _(random: Random, array: np.ndarray) -> None:
    array[...] = array.astype(np.float16).astype(array.dtype)


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


@on("two taps of a convolution exchanged", 3, "conv")
def _(random: Random, array: np.ndarray) -> None:
    array[..., [0, 1]] = array[..., [1, 0]]


def exchange(weights: Weights, first: str | None, other: str | None) -> bool:
    """False: there is no pair."""
    if first is None or other is None:
        return False
    weights[first][...], weights[other][...] = weights[other].copy(), weights[first].copy()
    return True


@fault("weights", "two layers' norms exchanged")
def _(random: Random, weights: Weights) -> bool:
    names = [n for n in weights if "layernorm" in n and n.endswith("weight")]
    first = one(random, names)
    return exchange(
        weights, first, one(random, [n for n in names if n != first and weights[n].shape == weights[first].shape])
    )


@fault("weights", "gate and up projection exchanged")
def _(random: Random, weights: Weights) -> bool:
    gate = one(random, [n for n in weights if "gate_proj" in n and n.replace("gate_proj", "up_proj") in weights])
    return exchange(weights, gate, gate and gate.replace("gate_proj", "up_proj"))


def coded(kind: str, endings: tuple[str, ...], change: Callable[[np.ndarray, int], None]) -> None:
    """A fault of a number of what low bits are stored as."""

    def plant(random: Random, weights: Weights) -> bool:
        name = one(random, [n for n in weights if n.endswith(endings)])
        if name is not None:
            change(weights[name].reshape(-1), int(random.integers(weights[name].size)))
        return name is not None

    fault("weights", kind)(plant)


def larger(numbers: np.ndarray, place: int) -> None:
    numbers[place] *= 1.1


def other_bits(codes: np.ndarray, place: int) -> None:
    codes[place] ^= 0x35


coded("the scale of a quantized block times 1.1", (".scales",), larger)
coded("a byte of codes that is not the weight's", (".blocks", ".rows", ".codes"), other_bits)
