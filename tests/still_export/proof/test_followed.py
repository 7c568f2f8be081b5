"""PyTorch selects what a target selected: all that follows from it is compared, and the selection is held to PyTorch's scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.cache import state_table
from still_export.mixers.hybrid_attention.module import HybridOpModule
from still_export.package.folder import Package
from still_export.proof.layerwise import Chain, LayerwiseModel
from still_export.proof.sessions import Session, Target
from still_export.proof.tolerance import Bounds
from still_export.proof.torch_cases import TorchCases
from still_export.proof.verify import Judged, Report, Verifier
from still_export.runtime.torch import TorchModel
from still_kernels.registry import ties_of
from still_kernels.ties import Choices
from tests.still_export.proof.test_layerwise import MANIFEST, source_of, tokens
from tests.still_export.tiny import CHUNK, VOCAB, still_model


def test_what_is_told_is_selected() -> None:
    """By offsets and by keys, of one chunk of one head; what is told of no chunk is selected by scores."""
    layers = LayerwiseModel(MANIFEST, source_of(still_model("llama", torch.float32)))
    prompt = tokens(1, 6 * CHUNK)
    start = {**layers.empty_feed(1, 6 * CHUNK), "input_ids": prompt, "new_tokens": np.array([6 * CHUNK])}

    def answer(follow: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
        chain = Chain.of(start)
        return layers.run([Chain(start, chain.calls, follow)])[0][0]

    natural = answer({})
    chosen = natural["present_chosen.1"]
    salient = chosen.shape[3]
    told = np.full((*chosen.shape[:2], 4, salient), -1)
    free = [n for n in range(CHUNK) if CHUNK + n not in chosen[0, 0]]
    told[0, 0, 1] = sorted([*free[:1], *(chosen[0, 0][(chosen[0, 0] // CHUNK == 1).all(-1)][0] % CHUNK)[1:]])
    found = answer({1: told})
    slots = slice(salient, 2 * salient)
    for name in ("present_salient_key.1", "present_kv_state.1"):
        changed = np.abs(found[name] - natural[name]).reshape(len(chosen), chosen.shape[1], -1).any(-1)
        assert changed[0].tolist() == [True, *[False] * (chosen.shape[1] - 1)], name
    assert (found["present_salient_key.1"][0, 0, slots] != natural["present_salient_key.1"][0, 0, slots]).any()
    assert set(told[0, 0, 1] + CHUNK) <= set(found["present_chosen.1"][0, 0].ravel())
    np.testing.assert_array_equal(found["present_salient_key.0"], natural["present_salient_key.0"])
    keys = found["present_salient_key.1"] + np.float32(1e-3) * np.random.default_rng(0).standard_normal(
        found["present_salient_key.1"].shape, np.float32
    )
    keys[0, 1:] = 0
    again = answer({1: keys})
    for name, x in found.items():
        np.testing.assert_array_equal(again[name], x, err_msg=name)


def verified(choose: Any) -> tuple[Report, int]:
    """What verify says of PyTorch's own runner, whose first layer selects otherwise, and how often PyTorch answered."""
    model = still_model("llama", torch.float32)
    table = state_table(model.config, torch.float32)
    still = model.config.still
    manifest: dict[str, Any] = {
        "target": "onnx",
        "model": {
            "all_logits": False,
            "vocab_size": VOCAB,
            "layer_types": [],
            "dtype": "float32",
            "kv_heads": model.config.num_key_value_heads,
        },
        "still": {
            "chunk_size": CHUNK,
            "salient_per_chunk": still.salient_per_chunk,
            "select_scope": still.select_scope,
        },
        "ops": {"HybridAttention": 1},
        "states": [s.to_dict() for s in table],
        "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
    }
    reference = LayerwiseModel(manifest, source_of(model), dtype=torch.float64)
    own = LayerwiseModel(manifest, source_of(model), ties_of(manifest).alike)
    cases = TorchCases(manifest, reference, own, (1, 5 * CHUNK), 2 * CHUNK)
    asked, draw = 0, cases.draw

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return draw(*args)

    cases.draw = counted  # type: ignore[method-assign]
    planted = still_model("llama", torch.float32)
    next(m for m in planted.modules() if isinstance(m, HybridOpModule)).watch = choose
    verifier = Verifier(Package(Path(), manifest), cases, Target(Package(Path(), manifest)), replays=0)
    session, total = Session(TorchModel(manifest, planted)), Choices()
    told = verifier._begun(session)
    settled = verifier._settled(session, cases.draw(range(cases.count), told), total, lambda name: None, told)
    judged = [Judged.of(case, pairs) for _, case, pairs, _ in sorted(settled, key=lambda each: each[0])]
    bounds = Bounds([each.case for each in judged], dtype="float32")
    return verifier._judge(judged, bounds, total, [], ""), asked


def test_a_runtime_that_selects_as_pytorch_is_asked_once() -> None:
    report, asked = verified(None)
    assert report.passed and asked == 1 and not report.selections.near_ties


def test_a_wrong_selection_is_found_and_what_follows_from_it_is_not() -> None:
    """Another token of chunk 1 than scores say: PyTorch selects it, too, and finds every state of the prompt right; its scores say that it
    is wrong."""

    def other(number: Tensor, keys: Tensor, selected: Tensor) -> Tensor:
        turned = selected.clone()
        free = torch.ones(*selected.shape[:3], keys.shape[3], dtype=torch.bool).scatter_(3, selected, False)
        turned[..., 0] = free.int().argmax(-1)
        return torch.where((number == 1)[:, None, :, None], turned.sort(-1).values, selected)

    report, _ = verified(other)
    assert not report.passed and report.selections.wrong and not report.selections.near_ties
    assert not [r for r in report.outputs if not r.passed and r.case.startswith("prefill")]
