"""What can be asked of a package on ONNX Runtime without PyTorch: nodes, kernels beside bodies, buffers, threads, graphs.

Each returns figures and raises AssertionError where something is wrong; `provider` is "cuda", or "cpu" to try the checks themselves.
"""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from still_export.package.trust import trust_package
from still_export.proof.sessions import Session
from still_export.runtime import ort
from still_export.runtime.ort import OrtModel


def opened(package: Path, provider: str, **options: Any) -> OrtModel:
    """The package's runner with its kernels, started."""
    trust_package(package)
    model = OrtModel(package, provider=provider, check=False, **options)
    assert model.native is not None, "the kernels were not loaded"
    model.start()
    return model


def without_kernels(package: Path, provider: str) -> OrtModel:
    """The same with function bodies."""
    with patch.object(ort, "native_library", lambda *a: None):
        model = OrtModel(package, provider=provider, check=False)  # no kernels, no replays
    model.start()
    return model


def tokens_of(model: OrtModel, count: int, seed: int = 0) -> np.ndarray:
    """Random ones, [1, count]."""
    return np.random.default_rng(seed).integers(3, model.manifest["model"]["vocab_size"], (1, count))


def difference(first: Any, second: Any) -> float:
    """Largest difference over the largest value; infinite or no numbers are an error."""
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    assert np.isfinite(first).all() and np.isfinite(second).all()
    return float(np.abs(first - second).max(initial=0) / max(np.abs(second).max(initial=0), 1e-30))


def nodes(package: Path, provider: str) -> dict[str, Any]:
    """On which provider nodes ran, from ONNX Runtime's profile, which lies in the working folder: every op of ours on this one."""
    model = opened(package, provider, profile=True)
    model.feed(tokens_of(model, 100))
    model.feed(tokens_of(model, 1))
    events = json.loads(Path(model.session.end_profiling()).read_text())
    ran = {(e["name"], e["args"]["op_name"], e["args"]["provider"]) for e in events if "provider" in e.get("args", {})}
    still = [(op, at) for _, op, at in ran if op in model.manifest["ops"]]
    cpu = sorted({op for _, op, at in ran if at.startswith("CPU")})
    ours = [op for op, at in still if at.startswith(provider.upper())]
    assert len(ours) == len(still) and set(ours) == set(model.manifest["ops"]), f"{ours} of {still}"
    return {"still_nodes": len(still), "copies": sum(op.startswith("Memcpy") for _, op, _ in ran), "on_the_cpu": cpu}


def kernels_and_bodies(package: Path, provider: str) -> dict[str, Any]:
    """Logits and states of a prefill of 200 tokens, or as many as the package holds, and 70 steps over chosen tokens."""
    results = []
    for model in (opened(package, provider), without_kernels(package, provider)):
        first = min(200, model.table.capacity_tokens - 70) if model.table.bounded else 200
        tokens = tokens_of(model, first + 70)
        logits = [model.feed(tokens[:, :first])]
        logits += [model.feed(tokens[:, i : i + 1]) for i in range(first, first + 70)]
        results.append((np.stack([x[0, -1] for x in logits]), model.state_arrays()))
    (logits_, states), (other, theirs) = results
    worst = max(states, key=lambda name: difference(states[name], theirs[name]))
    agree = float((logits_.argmax(-1) == other.argmax(-1)).mean())
    found = {"logits": difference(logits_, other), "states": difference(states[worst], theirs[worst])}
    return {**found, "worst_state": worst, "top_1": agree}


def buffers_apart(package: Path, provider: str) -> dict[str, Any]:
    """Past and present in different buffers against one buffer, bit for bit."""
    import onnxruntime

    model = opened(package, provider, replay=False)  # a call with buffers of its own must not be captured
    tokens = tokens_of(model, 140)
    model.feed(tokens[:, :130])
    before, length = model.state_arrays(), model.length.copy()
    wrong = []
    for count in (1, 9):  # decode, prefill
        model.load(before, length, count)
        expected = model.feed(tokens[:, :count])
        kept = model.state_arrays()
        model.load(before, length, count)
        given_states = model.state_arrays()  # with the room that the call needs
        binding, values = model.session.io_binding(), {}
        given = {"input_ids": tokens[:, :count], "new_tokens": np.array([count]), "past_length": length}
        for name, array in given.items():
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, np.int64), provider, 0)
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_output("logits", "cpu")
        binding.bind_output("present_length", "cpu")
        for state in model.table:
            past = model.states.past[state.name]
            rubbish = np.full(past.shape(), 7, model.values.array(past).dtype)
            values[state.present] = model.values.tensor(rubbish, state.dtype)
            binding.bind_ortvalue_input(state.past, past)
            binding.bind_ortvalue_output(state.present, values[state.present])
        model.session.run_with_iobinding(binding)
        logits = model.values.floats(binding.get_outputs()[0])  # of all tokens, where guesses are checked
        same = np.array_equal(logits[:, -expected.shape[1] :], expected)
        wrong += [] if same else [f"logits of {count}"]
        wrong += [
            f"{s.name} of {count}"
            for s in model.table
            if not np.array_equal(model.values.array(values[s.present]), kept[s.name])
        ]
        wrong += [
            f"past {s.name}"
            for s in model.table
            if not np.array_equal(model.values.array(model.states.past[s.name]), given_states[s.name])
        ][:3]
    assert not wrong, ", ".join(wrong[:6])
    return {}


def runs_at_once(package: Path, provider: str) -> dict[str, Any]:
    """One session from four threads with states of their own, against each alone, bit for bit."""
    base = opened(package, provider)

    def sequence(model: Any, seed: int) -> list[Any]:
        tokens = tokens_of(model, 120, seed)
        model.start()
        logits = [model.feed(tokens[:, :70])]
        logits += [model.feed(tokens[:, i : i + 1]) for i in range(70, 120)]
        return [*logits, *model.state_arrays().values()]

    alone = [sequence(copy.copy(base), seed) for seed in range(4)]
    found: list[Any] = [None] * 4

    def work(seed: int) -> None:
        try:
            found[seed] = sequence(copy.copy(base), seed)
        except Exception as error:
            found[seed] = error

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [repr(f)[:200] for f in found if not isinstance(f, list)]
    assert not failed, failed[0]
    same = [all(np.array_equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(alone, found, strict=True)]
    assert all(same), f"{same.count(False)} of 4 differ"
    return {"threads": len(same)}


def graph(package: Path, provider: str) -> dict[str, Any]:
    """Steps replayed from CUDA graphs against single steps, states bit for bit, over a growing state and two sequences."""
    model = opened(package, provider, replay=True)
    tokens = np.concatenate([tokens_of(model, 61), tokens_of(model, 61, 1)])
    (check,) = Session(model).checks({"input_ids": tokens, "new_tokens": np.array([61, 40])}, 140)
    assert check.passed, f"{check.name}; {check.what}"
    return {"check": check.name, "detail": check.what}


CHECKS = {each.__name__: each for each in (nodes, kernels_and_bodies, buffers_apart, runs_at_once, graph)}
