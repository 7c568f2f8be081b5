"""How far float32 is off float64 by position: a package's logits and states, or a linear state by itself, to lengths no text has.

python -m tools.benchmarks.drift tiny MODEL
python -m tools.benchmarks.drift [--record FOLDER] package DIR --model MODEL --tokens 131072
python -m tools.benchmarks.drift [--record FOLDER] state --tokens 1048576
python -m tools.benchmarks.drift [--record FOLDER] narrow --tokens 131072 [--mean 1]

`package` feeds random tokens in pieces to the package's runner and to PyTorch in float64 and compares, after each doubling, the last
position's logits (in units of their standard deviation) and the linear states and normalizers (largest error over largest value). `state`
adds random positive features times values to a sum, as a step does (a token at a time) and as prefill does (a chunk at a time), for eight
heads; the output is a query's read. `tiny` writes a random model small enough for float64 at great lengths: two layers of two heads of 16,
one token in 256 is salient. `narrow` adds chunks to states that are kept in fewer bits (`FORMS`), the normalizer in float32, and
compares reads, by Frobenius norm; values have a mean of their own in each column, times --mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tools.benchmarks.common import Findings, parser_of

FIRST, PIECE = 1024, 512
HEADS, FEATURES, SIZE, CHUNK = 8, 32, 16, 64


def off(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest error over the largest value."""
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def write_tiny(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from still_export import StillConfig
    from still_export.models.load import load_model

    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    config = LlamaConfig(**sizes, head_dim=16, vocab_size=64, max_position_embeddings=1 << 20, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    still = StillConfig(chunk_size=256, salient_per_chunk=1)
    load_model(folder, attach_untrained=True, still_config=still, dtype="float32").save_pretrained(folder)


def of_package(options: argparse.Namespace, findings: Findings) -> dict[str, str]:
    from still_export.loading.runtimes import open_runner, runtime_of
    from still_export.loading.torch import TorchModel
    from still_export.models.load import load_model
    from still_export.package.folder import open_package

    package = open_package(options.package)
    manifest = package.manifest
    runner = open_runner(package.path, manifest, runtime_of(manifest["target"], None).name, options.provider)
    deployment = {"capacity_tokens": options.tokens}
    exact = TorchModel(manifest, load_model(options.model, dtype="float32", deployment=deployment).double())
    tokens = np.random.default_rng(options.seed).integers(0, manifest["model"]["vocab_size"], (1, options.tokens))
    for model in (runner, exact):
        model.start(1, options.tokens)
    mark = FIRST
    for end in range(PIECE, options.tokens + 1, PIECE):
        ours, theirs = (np.asarray(m.feed(tokens[:, end - PIECE : end])[0, -1], np.float64) for m in (runner, exact))
        if end == mark:
            held, wanted = runner.state_arrays(), exact.state_arrays()
            linear = {name: off(held[name], wanted[name]) for name in held if name.startswith(("kv_state", "z_state"))}
            worst = max(linear, key=lambda name: linear[name])
            logits = float(np.abs(ours - theirs).max() / theirs.std())
            findings.add(
                position=end,
                logits=logits,
                states=linear[worst],
                worst=worst,
                same_token=bool(ours.argmax() == theirs.argmax()),
            )
            mark *= 2
    return {"package": package.path.resolve().name, "target": manifest["target"], "dtype": manifest["model"]["dtype"]}


def of_state(options: argparse.Namespace, findings: Findings) -> dict[str, str]:
    draw = np.random.default_rng(options.seed)
    shape = (HEADS, FEATURES, SIZE + 1)  # the last column is the normalizer
    exact, stepped, chunked = np.zeros(shape), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    query = np.abs(draw.standard_normal((HEADS, FEATURES)))
    mark = FIRST

    def read(state: np.ndarray) -> np.ndarray:
        parts: Any = np.einsum("hf,hfd->hd", query, state.astype(np.float64))
        return parts[:, :-1] / parts[:, -1:]

    for end in range(CHUNK, options.tokens + 1, CHUNK):
        features = np.abs(draw.standard_normal((CHUNK, HEADS, FEATURES))).astype(np.float32)
        values = np.concatenate([draw.standard_normal((CHUNK, HEADS, SIZE)), np.ones((CHUNK, HEADS, 1))], -1).astype(
            np.float32
        )
        exact += np.einsum("chf,chd->hfd", features.astype(np.float64), values.astype(np.float64))
        chunked += np.einsum("chf,chd->hfd", features, values)
        for feature, value in zip(features, values, strict=True):
            stepped += feature[:, :, None] * value[:, None, :]
        if end == mark:
            errors = {
                f"{name}_{what}": error
                for name, state in (("step", stepped), ("chunk", chunked))
                for what, error in (
                    ("sum", off(state[..., :-1], exact[..., :-1])),
                    ("normalizer", off(state[..., -1], exact[..., -1])),
                    ("read", off(read(state), read(exact))),
                )
            }
            findings.add(position=end, **errors)
            mark *= 2
    return {"state": f"{FEATURES} x {SIZE}, chunks of {CHUNK}"}


def _bits(x: np.ndarray) -> Any:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def nearest(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Rounded to bfloat16, to the nearest one, ties to even."""
    bits = _bits(x)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)  # type: ignore[no-any-return]


def by_chance(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Rounded to one of the two bfloat16 beside it, the nearer the likelier."""
    bits = _bits(x)
    return ((bits + draw.integers(0, 1 << 16, bits.shape, np.uint32)) & 0xFFFF0000).view(np.float32)  # type: ignore[no-any-return]


def in_steps(rest: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """What rounding took, as kernels keep it."""
    import torch

    from still_kernels.hybrid_attention.narrow import narrowed, widened

    return (widened(*narrowed(torch.from_numpy(kept + rest))) - torch.from_numpy(kept)).numpy()


FORMS: dict[str, tuple[Any, Any]] = {
    "bfloat16": (nearest, None),
    "by chance": (by_chance, None),
    "with bfloat16": (nearest, lambda rest, kept: nearest(rest, None)),  # type: ignore[arg-type]
    "with int8": (nearest, in_steps),
}
"""How a state is rounded, and what is kept of the rest, which the next chunk is added to; reads take the rounded state alone."""


def of_narrow(options: argparse.Namespace, findings: Findings) -> dict[str, str]:
    draw = np.random.default_rng(options.seed)
    mean = options.mean * draw.standard_normal((HEADS, SIZE))
    exact, plain = np.zeros((HEADS, FEATURES, SIZE)), np.zeros((HEADS, FEATURES, SIZE), np.float32)
    normalizer = np.zeros((HEADS, FEATURES))
    kept = {name: (plain.copy(), plain.copy()) for name in FORMS}
    queries = np.abs(draw.standard_normal((64, HEADS, FEATURES)))
    mark = FIRST

    def read(state: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.einsum("nhf,hfd->nhd", queries, state.astype(np.float64))
        return found / np.einsum("nhf,hf->nh", queries, normalizer)[..., None]

    for end in range(CHUNK, options.tokens + 1, CHUNK):
        features = np.abs(draw.standard_normal((CHUNK, HEADS, FEATURES))).astype(np.float32)
        values = (draw.standard_normal((CHUNK, HEADS, SIZE)) + mean).astype(np.float32)
        exact += np.einsum("chf,chd->hfd", features.astype(np.float64), values.astype(np.float64))
        normalizer += features.sum(0, dtype=np.float64)
        chunk = np.einsum("chf,chd->hfd", features, values)
        plain += chunk
        for name, (rounding, rest) in FORMS.items():
            wide = kept[name][0] + kept[name][1] + chunk
            state = rounding(wide, draw)
            kept[name] = state, state * 0 if rest is None else rest(wide - state, state)
        if end == mark:
            wanted = read(exact)
            every = {"float32": plain, **{name: state for name, (state, _) in kept.items()}}
            errors = {
                name: float(np.linalg.norm(read(state) - wanted) / np.linalg.norm(wanted))
                for name, state in every.items()
            }
            findings.add(position=end, **errors)
            mark *= 2
    return {"state": f"{FEATURES} x {SIZE}, chunks of {CHUNK}, mean {options.mean:g}"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    verbs = parser.add_subparsers(dest="verb", required=True)
    package, state = verbs.add_parser("package"), verbs.add_parser("state")
    package.add_argument("package", type=Path)
    package.add_argument("--model", required=True)
    package.add_argument("--provider", default="cpu")
    verbs.add_parser("tiny").add_argument("folder", type=Path)
    narrow = verbs.add_parser("narrow")
    narrow.add_argument("--mean", type=float, default=1.0, help="of values, against a deviation of 1")
    for verb, tokens in ((package, 1 << 17), (state, 1 << 20), (narrow, 1 << 17)):
        verb.add_argument("--tokens", type=int, default=tokens)
    options = parser.parse_args()
    if options.verb == "tiny":
        write_tiny(options.folder)
        return
    findings = Findings()
    subject = {"package": of_package, "state": of_state, "narrow": of_narrow}[options.verb](options, findings)
    findings.record(options.record, "drift", subject, seed=options.seed)


if __name__ == "__main__":
    main()
