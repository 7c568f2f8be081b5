"""Layers are judged on the runtime's own input, where one layer's rounding is all that may differ."""

from pathlib import Path

import numpy as np
import pytest

from still_export.graph.options import ExportOptions
from still_export.proof.answers import Question, chosen_for_layers
from still_export.proof.chains import Chain, ChainCall
from still_export.proof.layer_inputs import layer_inputs
from still_export.proof.layerwise import LayerwiseModel
from still_export.proof.package import VerifyOptions, verify
from still_export.proof.verify import BY_LAYER, NO_PROMPT
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from tests.faults.campaign import Broken, Drawn, outcomes, package_of
from tests.faults.registry import FAULTS
from tests.still_export.conftest import Exporter
from tests.still_export.linear_models import linear_model
from tests.still_export.proof.test_layerwise import MANIFEST, source_of, tokens
from tests.still_export.tiny import still_model

SMALL = ("the residual in the wrong precision", "a matrix times 1.005", "a row of o_proj times 1.1")
"""Faults of float16 that the rounding of a whole run hides."""


def test_layers_that_read_their_own_outputs_give_what_the_whole_model_gives() -> None:
    layers = LayerwiseModel(MANIFEST, source_of(still_model("llama")))
    call = ChainCall(tokens(2, 30), np.array([30, 7]))
    start = layers.empty_feed(2, 30)
    passage = layers.begin([Chain(start, [call])])
    inputs = []
    for index in range(layers.layers):
        passage.through(index)
        inputs.append(passage._work[0].hidden[0].numpy().copy())
    passage.answer()
    whole = passage.outputs[0][0]
    read = ChainCall(call.tokens, call.new_tokens, inputs=inputs[:-1])
    (found,) = layers.run([Chain(start, [read])])[0]
    for name, right in whole.items():
        np.testing.assert_array_equal(found[name], right, err_msg=name)
    moved = [inputs[0], inputs[1] + 0.1]
    (other,) = layers.run([Chain(start, [ChainCall(call.tokens, call.new_tokens, inputs=moved)])])[0]
    for layer, same in ((0, True), (1, True), (2, False)):
        name = f"present_window_key.{layer}"
        assert np.array_equal(other[name], whole[name]) == same, (
            "a layer shows what it reads, and nothing of the others"
        )
    assert np.array_equal(other["present_hidden.1"], found["present_hidden.1"]) and "present_hidden.2" not in found


def test_few_cases_are_asked_again() -> None:
    def asked(rows: int, *sizes: int, steps: int = 0) -> Question:
        feeds = [{"input_ids": np.zeros((rows, n), int), "new_tokens": np.full(rows, n)} for n in sizes]
        return Question(feeds, (np.zeros((rows, 1)),) * steps, (0,) * min(steps, 1))

    questions = [
        asked(1, 1),
        asked(1, 64),
        asked(1, 129),
        asked(1, 1000),
        asked(4, 193),
        asked(1, 63, 65),
        asked(1, 160, steps=4),
    ]
    assert list(chosen_for_layers(questions)) == [2, 5]
    assert not chosen_for_layers([asked(1, 1), asked(1, 9), asked(1, 1000)])


@pytest.mark.slow
def test_prompts_that_are_too_short_or_too_long_for_it_are_said(export_tiny: Exporter) -> None:
    package = export_tiny("llama", "float16", {"native": False})
    report = verify(package.path, VerifyOptions(lengths=(1, 9), decode_steps=2)).report
    assert report.passed and NO_PROMPT in report.not_asked


@pytest.mark.slow
def test_layers_that_read_more_than_the_graph_shows_are_not_asked(tmp_path: Path) -> None:
    """RWKV-7's read the first layer's values beside the hidden states."""
    linear_model("rwkv7").save_pretrained(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), dtype="float16", still={"capacity_tokens": 256})
    package = export(asked, tmp_path / "package", options=OrtOptions(native=False))
    report = verify(package.path, VerifyOptions(model=str(tmp_path / "model"), lengths=(65,), decode_steps=1)).report
    assert report.passed and BY_LAYER in report.not_asked


@pytest.mark.slow
def test_small_faults_of_half_precision_are_found_by_layer(tmp_path: Path) -> None:
    package = package_of(tmp_path, "hybrid", "float16")
    layers = package.manifest["model"]["layers"]
    assert len(layer_inputs(package.path / "model.onnx", layers)) == layers
    subject = Broken(package, "bodies", Drawn(package, 0), tmp_path)
    report = subject.clean()
    assert report.passed and not report.not_asked
    assert {o.output for o in report.outputs if "by layer" in o.case} >= {f"present_hidden.{n}" for n in range(layers)}
    found = list(outcomes(subject, [0], [each for each in FAULTS if each.name in SMALL]))
    assert len(found) == len(SMALL) and all(each.found for each in found), [
        each.fault for each in found if not each.found
    ]
