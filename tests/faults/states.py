"""Faults of states, planted in a runner between its calls."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.registry import Random, as_bfloat16, fault, one, two

Arrays = dict[str, np.ndarray]
Change = Callable[[Random, str, Arrays, Arrays, Any], bool | None]
LINEAR = ("kv_state", "recurrent_state", "ssm_state", "z_state")
SLOTS = ("window_key", "window_value", "key", "value")
SALIENT = ("salient_key", "salient_value")
SCORES = ("window_score",)
ANY = (*LINEAR, *SLOTS, *SALIENT, *SCORES, "conv_state")
CALLS = 36
"""Calls of which one is drawn for a fault that happens once."""


def after(kind: str, *states: str, once: bool = False) -> Callable[[Change], Change]:
    """A fault of one random state of these kinds after every call, or once after a random call that it can change.

    The change is told the state's name, all states after and before the call, and the runner; False: nothing to change yet.
    """

    def register(change: Change) -> Change:
        def plant(random: Random, runner: Any) -> bool:
            name = one(random, [s.name for s in runner.table if s.name.split(".")[0] in states])
            if name is None:
                return False
            feed, done = runner.feed, [int(random.integers(CALLS)) if once else 0]

            def faulty(ids: np.ndarray, new: np.ndarray | None = None, first: int = 0) -> np.ndarray:
                before = runner.state_arrays()
                logits = feed(ids, new, first)
                done[0] -= 1
                if done[0] < 0 and (not once or done[0] > -CALLS):
                    arrays = runner.state_arrays()
                    if (
                        before[name].shape == arrays[name].shape
                        and change(random, name, arrays, before, runner) is not False
                    ):
                        runner._write_states(arrays)
                        done[0] = -CALLS if once else 0
                return np.asarray(logits)

            runner.feed = faulty
            return True

        fault("states", kind)(plant)
        return change

    return register


def slot(random: Random, array: np.ndarray, least: int = 1) -> tuple[int, int, int] | None:
    """A random slot (sequence, head, number) of [B, H, N, ..] that is held, of a head with at least `least` of them."""
    held = array.reshape(*array.shape[:3], -1).any(-1)
    return one(random, map(tuple, np.argwhere(held & (held.sum(-1, keepdims=True) >= least)).tolist()))


def other_slot(random: Random, array: np.ndarray, taken: tuple[int, int, int]) -> int | None:
    held = np.flatnonzero(array[taken[:2]].reshape(array.shape[2], -1).any(-1))
    return one(random, held[held != taken[2]].tolist())


def times(factor: float, part: Any = ...) -> Change:
    def change(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
        now[name][part] *= np.asarray(factor, now[name].dtype)
        return bool(now[name].any())

    return change


after("a linear state times 1.005", *LINEAR)(times(1.005))
after("scores times 1.005", *SCORES)(times(1.005))
after("a linear state times 1.02 once", *LINEAR, once=True)(times(1.02))
after("a head's state times 1.02", *LINEAR)(times(1.02, np.s_[:, 0]))


def at_slot(
    kind: str, *states: str, least: int = 1
) -> Callable[[Callable[[Random, np.ndarray, Any], bool | None]], Any]:
    """A fault that happens once at a slot that is held, of a head with at least `least` of them; False: nothing to change there."""

    def register(change: Callable[[Random, np.ndarray, Any], bool | None]) -> Any:
        @after(kind, *states, once=True)
        def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
            place = slot(random, now[name], least) if now[name].ndim > 2 else None
            return place is not None and change(random, now[name], place) is not False

        return change

    return register


def times_at(factor: float) -> Callable[[Random, np.ndarray, Any], None]:
    def change(random: Random, array: np.ndarray, place: Any) -> None:
        array[place] *= np.asarray(factor, array.dtype)

    return change


at_slot("the scale of a row of 8 bits times 1.02", "window_key_scale", "key_scale", "salient_key_scale")(times_at(1.02))


@after("a row of a head's state times 1.1 once", *LINEAR, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    place = slot(random, now[name]) if now[name].ndim > 3 else None
    return place is not None and times_at(1.1)(random, now[name], place) is None


@after("two heads' states exchanged", *LINEAR, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    a, b = two(random, now[name].shape[1])
    now[name][:, [a, b]] = now[name][:, [b, a]]
    return bool(now[name].any())


@after("a state one call old", *ANY, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    changed = not np.array_equal(now[name], before[name])
    now[name] = before[name]
    return changed


@after("all states one call old", *ANY, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    if any(now[n].shape != before[n].shape for n in now):
        return False
    now.update(before)
    return True


@after("a state rounded to half precision", *LINEAR, *SLOTS)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> None:
    now[name] = now[name].astype(np.float16).astype(now[name].dtype)


@after("a state rounded to bfloat16", *LINEAR, *SLOTS)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    if now[name].dtype.kind != "f":
        return False
    now[name] = as_bfloat16(now[name])
    return True


@after("a number of a state that is none", *LINEAR, *SLOTS, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    if now[name].dtype.kind != "f":
        return False
    place = np.argwhere(now[name])
    if not len(place):
        return False
    now[name][tuple(place[int(random.integers(len(place)))])] = np.nan
    return True


@after("a state begun anew", *LINEAR, *SLOTS, "conv_state", once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    held = bool(now[name].any())
    now[name][...] = 0
    return held


@after("the newest row of a cache stale", *SLOTS, once=True)
@after("a score stale", *SCORES, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    changed = np.argwhere((now[name] != before[name]).reshape(*now[name].shape[:3], -1).any(-1))
    if not len(changed):
        return False
    place = tuple(changed[int(random.integers(len(changed)))])
    now[name][place] = before[name][place]
    return True


@after("a ring read before it is written", "window_key", "window_value", once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    changed = np.argwhere((now[name] != before[name]).reshape(*now[name].shape[:3], -1).any((1, 3)))
    if not len(changed):
        return False
    sequence, number = changed[-1]
    now[name][sequence, :, number] = 0
    return True


@at_slot("a slot's row of the slot beside", *SLOTS, *SALIENT, least=2)
@at_slot("a salient slot of another token", "salient_key", least=2)
@at_slot("a salient value of another token", "salient_value", least=2)
def _(random: Random, array: np.ndarray, place: Any) -> None:
    array[place] = array[(*place[:2], other_slot(random, array, place))]


@at_slot("two slots of a head exchanged", *SLOTS, *SALIENT, least=2)
def _(random: Random, array: np.ndarray, place: Any) -> None:
    head = array[place[:2]]
    head[[place[2], other_slot(random, array, place)]] = head[[other_slot(random, array, place), place[2]]]


@at_slot("two scores of a head exchanged", *SCORES, least=2)
def _(random: Random, array: np.ndarray, place: Any) -> None:
    number, head = other_slot(random, array, place), array[place[:2]]
    head[[place[2], number]] = head[[number, place[2]]]


@at_slot("a slot of a neighbouring head", *SLOTS)
@at_slot("a salient slot of a neighbouring head", *SALIENT)
def _(random: Random, array: np.ndarray, place: Any) -> bool:
    array[place] = array[place[0], (place[1] + 1) % array.shape[1], place[2]]
    return array.shape[1] > 1


@at_slot("a salient slot empty", *SALIENT)
@at_slot("a slot of a cache empty", *SLOTS)
def _(random: Random, array: np.ndarray, place: Any) -> None:
    array[place] = 0


@after("a salient slot filled a chunk early", "salient_key", once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    window = now[name.replace("salient", "window")]
    empty = np.argwhere(~now[name][:, 0].reshape(*now[name].shape[:1], now[name].shape[2], -1).any(-1))
    if not len(empty) or not window[0, 0, 0].any():
        return False
    sequence, number = empty[0]
    now[name][sequence, :, number] = window[sequence, 0, 0]
    return True


def sequences(kind: str, change: Callable[[np.ndarray, int, int], None]) -> None:
    """A fault that happens once to two sequences of a batch."""

    @after(kind, *ANY, once=True)
    def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
        if len(now[name]) > 1:
            change(now[name], *two(random, len(now[name])))
        return len(now[name]) > 1


def exchange(array: np.ndarray, a: int, b: int) -> None:
    array[[a, b]] = array[[b, a]]


def overwrite(array: np.ndarray, a: int, b: int) -> None:
    array[a] = array[b]


sequences("two sequences' states exchanged", exchange)
sequences("a sequence's state in the next one", overwrite)


@after("a convolution a tap late", "conv_state", once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    now[name] = np.roll(now[name], 1, -1)
    return bool(now[name].any())


@after("a channel of a convolution stale", "conv_state", once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    channel = int(random.integers(now[name].shape[1]))
    changed = not np.array_equal(now[name][:, channel], before[name][:, channel])
    now[name][:, channel] = before[name][:, channel]
    return changed


@after("the state of another layer", *ANY, once=True)
def _(random: Random, name: str, now: Arrays, before: Arrays, runner: Any) -> bool:
    kind = name.split(".")[0]
    other = one(random, [n for n in now if n.split(".")[0] == kind and n != name and now[n].shape == now[name].shape])
    if other is None or not now[other].any():
        return False
    now[name] = now[other].copy()
    return True
