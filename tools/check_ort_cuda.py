#!/usr/bin/env python3
"""One check of a package on ONNX Runtime's CUDA provider, in a process of its own: what tools/prove_ort_cuda.py runs.

  python3 tools/check_ort_cuda.py CHECK PACKAGE

The last line says RESULT and what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXTS = (1024, 4096, 8000)


def opened(package: Path, replay: bool = False, **options: Any) -> Any:
    """The package's runner on CUDA, started."""
    from still_export.package.trust import trust_package
    from still_export.runtime.ort import OrtModel

    trust_package(package)
    model = OrtModel(package, provider="cuda", check=False, replay=replay, **options)
    if model.native is None:
        raise RuntimeError("the kernels were not loaded")
    model.start()
    return model


def without_kernels(package: Path) -> Any:
    """The same with function bodies."""
    from still_export.runtime import ort

    ort.native_library = lambda *a: None
    model = ort.OrtModel(package, provider="cuda", check=False)  # no kernels, no replays
    model.start()
    return model


def tokens_of(model: Any, count: int, seed: int = 0) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(3, model.manifest["model"]["vocab_size"], (1, count))


def difference(first: Any, second: Any) -> float:
    """Largest difference over the largest value."""
    import numpy as np

    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return float("nan")
    return float(np.abs(first - second).max(initial=0) / max(np.abs(second).max(initial=0), 1e-30))


def partition(package: Path) -> str:
    """On which provider nodes ran, from ONNX Runtime's profile."""
    os.chdir(tempfile.mkdtemp())
    model = opened(package, profile=True)
    model.feed(tokens_of(model, 100))
    model.feed(tokens_of(model, 1))
    events = json.loads(Path(model.session.end_profiling()).read_text())
    nodes = {
        (e["name"], e["args"]["op_name"], e["args"]["provider"]) for e in events if "provider" in e.get("args", {})
    }
    still = [(op, provider) for _, op, provider in nodes if op in model.manifest["ops"]]
    cpu = sorted({op for _, op, provider in nodes if provider.startswith("CPU")})
    copies = sum(op.startswith("Memcpy") for _, op, _ in nodes)
    ours = [op for op, provider in still if provider.startswith("CUDA")]
    verdict = "ok" if len(ours) == len(still) and set(ours) == set(model.manifest["ops"]) else "FAILED"
    return f"{verdict}: {len(ours)} of {len(still)} still nodes on CUDA, {copies} copies, on the CPU: {' '.join(cpu) or 'none'}"


def kernels_and_bodies(package: Path) -> str:
    """Logits and states of a prefill and 70 steps over chosen tokens."""
    import numpy as np

    results = []
    for model in (opened(package), without_kernels(package)):
        tokens = tokens_of(model, 270)
        logits = [model.feed(tokens[:, :200])]
        logits += [model.feed(tokens[:, i : i + 1]) for i in range(200, 270)]
        results.append((np.stack([x[0, -1] for x in logits]), model.state_arrays()))
    (logits, states), (other, theirs) = results
    agree = float((logits.argmax(-1) == other.argmax(-1)).mean())
    worst = max(states, key=lambda name: difference(states[name], theirs[name]))
    by = difference(states[worst], theirs[worst])
    return f"logits differ by {difference(logits, other):.1e}, top-1 {agree:.1%}, states by {by:.1e} ({worst})"


def buffers_apart(package: Path) -> str:
    """Past and present in different buffers against one buffer, bit for bit."""
    import numpy as np
    import onnxruntime

    model = opened(package)
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
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, np.int64), "cuda", 0)
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_output("logits", "cpu")
        binding.bind_output("present_length", "cpu")
        for state in model.table:
            past = model._past[state.name]
            rubbish = np.full(past.shape(), 7, model._array(past).dtype)
            values[state.present] = model._tensor(rubbish, state.dtype)
            binding.bind_ortvalue_input(state.past, past)
            binding.bind_ortvalue_output(state.present, values[state.present])
        model.session.run_with_iobinding(binding)
        same = np.array_equal(model._floats(binding.get_outputs()[0]), expected)
        wrong += [] if same else [f"logits of {count}"]
        wrong += [
            f"{s.name} of {count}"
            for s in model.table
            if not np.array_equal(model._array(values[s.present]), kept[s.name])
        ]
        wrong += [
            f"past {s.name}"
            for s in model.table
            if not np.array_equal(model._array(model._past[s.name]), given_states[s.name])
        ][:3]
    return "ok: bit for bit, past left alone" if not wrong else f"FAILED: {', '.join(wrong[:6])}"


def runs_at_once(package: Path) -> str:
    """One session from four threads with states of their own, against each alone, bit for bit."""
    import copy

    import numpy as np

    base = opened(package)

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
    if failed:
        return f"FAILED: {failed[0]}"
    same = [all(np.array_equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(alone, found, strict=True)]
    return "ok: 4 threads, bit for bit" if all(same) else f"FAILED: {same.count(False)} of 4 differ"


def graph(package: Path) -> str:
    """Steps replayed from CUDA graphs against single steps, states bit for bit, over a growing state and two rows."""
    import numpy as np

    from still_export.proof.sessions import Session

    model = opened(package, replay=True)
    tokens = np.concatenate([tokens_of(model, 61), tokens_of(model, 61, 1)])
    (check,) = Session(model).checks({"input_ids": tokens, "new_tokens": np.array([61, 40])}, 140)
    return f"{'ok' if check.passed else 'FAILED'}: {check.name}; {check.detail}"


def refusal(package: Path) -> str:
    """A package whose kernels are for another GPU says so."""
    try:
        opened(package)
    except Exception as error:
        text = str(error)
        return f"{'ok' if 'the archive has' in text and 'the GPU is' in text else 'FAILED'}: {text[-230:]}"
    return "FAILED: it was opened"


def verify(package: Path) -> str:
    """The verb, against PyTorch's recorded answers."""
    command = [
        sys.executable,
        "-m",
        "still_export.cli.main",
        "verify",
        str(package),
        "--provider",
        "cuda",
        "--trust-native",
    ]
    done = subprocess.run([*command, "--calls", f"{package}.npz", "--quiet"], capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).split(
        "\n"
    )  # ONNX Runtime warns on the other
    said = [line for line in lines if line.strip()]
    return f"{'ok' if done.returncode == 0 else 'FAILED'}: {said[-1][:200] if said else 'it said nothing'}"


def fill_weights(package: Path) -> None:
    """Random weights of their types in the place of a file that stayed behind."""
    import numpy as np
    import onnx

    path = package / "model.onnx.data"
    if path.exists():
        return
    manifest = json.loads((package / "manifest.json").read_text())
    graph = onnx.load(str(package / "model.onnx"), load_external_data=False).graph
    random = np.random.default_rng(0)
    normal = random.standard_normal(1 << 22, dtype=np.float32) * 0.02
    blocks = {
        onnx.TensorProto.FLOAT: normal.tobytes(),
        onnx.TensorProto.FLOAT16: normal.astype(np.float16).tobytes(),
        onnx.TensorProto.UINT8: (codes := random.bytes(1 << 22)),
        onnx.TensorProto.INT32: codes,
    }
    with path.open("wb") as file:
        file.truncate(manifest["files"][path.name]["size_bytes"])
        for tensor in graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            size = int(where.get("length", 0))
            block = blocks[tensor.data_type] if size else b""
            file.seek(int(where.get("offset", 0)))
            for start in range(0, size, len(block) or 1):
                file.write(block[: size - start])


def prefill_ms(model: Any, context: int, piece: int, runs: int = 2) -> float:
    """Best of `runs`, behind an empty state."""
    tokens = tokens_of(model, context)
    times = []
    for _ in range(runs):
        model.start(1, context + 64)
        begin = time.perf_counter()
        for start in range(0, context, piece):
            model.feed(tokens[:, start : start + piece])
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def decode_ms(model: Any, steps: int = 40) -> str:
    """Median step from where the model is, and the replayed call without what Python does between steps."""
    import numpy as np

    following = model.greedy(np.full(model.batch, 5), steps)
    next(following)
    times = []
    for _ in range(steps - 1):
        begin = time.perf_counter()
        next(following)
        times.append(time.perf_counter() - begin)
    text = f"decode {statistics.median(times) * 1e3:.3f} ms"
    if model.replays:
        binding, _, options = model._replayed_step()
        begin = time.perf_counter()
        for _ in range(20):
            model.session.run_with_iobinding(binding, options)
        text += f" (the replay alone {(time.perf_counter() - begin) * 50:.3f})"
    return text


def speed(package: Path, replay: bool, contexts: tuple[int, ...] = CONTEXTS, bodies: bool = False) -> str:
    """Milliseconds of a prefill in pieces of 2,048 and of a decode step, by context."""
    fill_weights(package)
    model = without_kernels(package) if bodies else opened(package, replay=replay)
    return "; ".join(
        f"{context}: prefill {prefill_ms(model, context, 2048):.1f} ms, {decode_ms(model)}" for context in contexts
    )


def pieces(package: Path) -> str:
    """Prefill of 8,000 tokens by the size of its calls."""
    fill_weights(package)
    model = opened(package)
    sizes = (512, 1024, 2048, 4096, 8192)
    return "; ".join(f"calls of {size}: {prefill_ms(model, 8000, size, 4):.1f} ms" for size in sizes)


def large(package: Path, context: int = 65536) -> str:
    """Prefill of 64K in calls of 2,048 and 16,384, and steps behind it of one row and of eight, whose state is empty, which costs the
    same."""
    fill_weights(package)
    model = opened(package, replay=True)
    context = min(context, model.table.capacity_tokens - 256)
    texts = []
    for batch in (1, 8):
        model.start(batch, context + 64)
        model.length[:] = context
        texts.append(f"batch {batch}: {decode_ms(model)}")
        print(texts[-1], flush=True)
    for size in (2048, 16384):
        texts.append(f"prefill in calls of {size}: {prefill_ms(model, context, size):.1f} ms")
        print(texts[-1], flush=True)
    layers = model.manifest["model"]["layers"]
    return f"{layers} layers, {context} tokens: " + "; ".join(texts)


def kernels(package: Path, steps: int = 16) -> str:
    """What the GPU runs in a replayed step, by PyTorch's profiler."""
    import torch

    fill_weights(package)
    model = opened(package, replay=True)
    context = model.table.capacity_tokens - 256
    model.start(1, context + 64)
    model.length[:] = context
    decode_ms(model)
    binding, _, options = model._replayed_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            model.session.run_with_iobinding(binding, options)
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    for each in found[:30]:
        print(f"{each.count / steps:8.1f}{each.self_device_time_total / steps:10.1f}  {each.key[:120]}")
    total = sum(each.self_device_time_total for each in found) / steps
    launches = sum(each.count for each in found) / steps
    return f"behind {context} tokens: {launches:.0f} launches, {total:.0f} us of kernels a step"


def peer(package: Path) -> str:
    """What `speed` measures, of onnxruntime-genai with full attention; its step chooses a token, ours too."""
    import numpy as np
    import onnxruntime_genai as genai

    model = genai.Model(str(package))
    texts = []
    for context in CONTEXTS:
        prefill, decode = [], []
        for seed in range(3):
            parameters = genai.GeneratorParams(model)
            parameters.set_search_options(max_length=8192, min_length=8192, do_sample=False, batch_size=1)
            generator = genai.Generator(model, parameters)
            begin = time.perf_counter()
            generator.append_tokens(np.random.default_rng(seed).integers(5, 49000, context).astype(np.int32))
            for step in range(60):
                generator.generate_next_token()
                generator.get_next_tokens()
                end = time.perf_counter()
                (decode if step else prefill).append(end - begin)
                begin = end
            del generator
        milliseconds = [1e3 * value for value in (min(prefill), statistics.median(decode))]
        texts.append(f"{context}: prefill {milliseconds[0]:.1f} ms, decode {milliseconds[1]:.3f} ms")
    return "; ".join(texts)


CHECKS: dict[str, Callable[[Path], str]] = {
    "nodes": partition,
    "verify": verify,
    "kernels and bodies": kernels_and_bodies,
    "buffers apart": buffers_apart,
    "runs at once": runs_at_once,
    "graph": graph,
    "refusal": refusal,
    "speed replayed": lambda package: speed(package, True),
    "speed by call": lambda package: speed(package, False, CONTEXTS[:1]),
    "peer": peer,
    "pieces": pieces,
    "large": large,
    "kernels": kernels,
    "speed of bodies": lambda package: speed(package, False, CONTEXTS[:1], bodies=True),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("package", type=Path)
    options = parser.parse_args()
    print(f"RESULT {CHECKS[options.check](options.package)}")


if __name__ == "__main__":
    main()
