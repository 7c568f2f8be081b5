"""Qwen3.5 with images: encoder, positions and text from exported graphs against transformers' own class in float64; what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.graph.options import ExportOptions
from still_export.models.load import open_source
from still_export.package.folder import open_package
from still_export.proof.vision import vision_check
from still_export.runtime.images import image_positions
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError
from still_export.targets.export import export, plan_job
from still_graphs.states import EMBEDDINGS, POSITIONS
from tests.docs.pages import ROOT
from tests.still_export.proof.plants import planted
from tests.still_export.targets.portable.test_linear_export import call
from tests.still_export.vision_models import CHANNELS, IMAGE, PATCH_VALUES, vision_model

GRIDS = [(1, 6, 10), (1, 4, 4)]
FEATURES, LOGITS = 1e-5, 3e-5
"""Of the largest."""
FAULT = 30 * LOGITS


class Prompt:
    """Two images in a text, what transformers says of it, and the package's answers."""

    def __init__(self, folder: Path, experts: bool) -> None:
        model = vision_model(experts)
        model.save_pretrained(folder / "model")
        self.package = folder / "package"
        options = ExportOptions(str(folder / "model"), vision=True)
        export(options, self.package, options=plan_job("onnx", {"native": False, "model": options.model}).options)
        random = np.random.default_rng(1)
        parts = [
            random.integers(0, 280, 5),
            [IMAGE] * 15,
            random.integers(0, 280, 3),
            [IMAGE] * 4,
            random.integers(0, 280, 4),
        ]
        self.ids = np.concatenate(parts)[None]
        self.seen = self.ids[0] == IMAGE
        self.pixels = [random.standard_normal((1, h * w, PATCH_VALUES), np.float32) for _, h, w in GRIDS]
        model, flat = model.double(), torch.from_numpy(np.concatenate(self.pixels, axis=1)[0]).double()
        kinds, grids = torch.from_numpy(self.seen[None]).int(), torch.tensor(GRIDS)
        with torch.no_grad():
            found = model(
                input_ids=torch.from_numpy(self.ids), pixel_values=flat, image_grid_thw=grids, mm_token_type_ids=kinds, use_cache=False
            )  # fmt: skip
            self.features = model.model.visual(flat, grid_thw=grids).pooler_output.numpy()
        self.model, self.logits = model, found.logits[0].numpy()
        self.positions = model.model.get_rope_index(torch.from_numpy(self.ids), kinds, grids)[0][:, 0].numpy()

    def encoded(self, swap: bool = False) -> np.ndarray:
        """Features by the package's encoder; `swap`: with rows and columns of the grid exchanged."""
        session = onnxruntime.InferenceSession(str(self.package / "vision.onnx"), providers=["CPUExecutionProvider"])
        sizes = [np.array(size[::-1] if swap else size) for _, *size in GRIDS]
        return np.concatenate(
            [session.run(None, {"pixel_values": x, "grid": n})[0][0] for x, n in zip(self.pixels, sizes, strict=True)]
        )

    def error(self, features: np.ndarray, positions: np.ndarray, cuts: tuple[int, ...] = ()) -> float:
        """Of the logits at the ends of pieces, in parts of the largest."""
        embeds = np.zeros((1, self.ids.shape[1], CHANNELS), np.float32)
        embeds[0, self.seen] = features
        ids, runner, worst = np.where(self.seen, -1, self.ids), OrtModel(self.package), 0.0
        runner.start(1)
        for begin, end in zip((0, *cuts), (*cuts, self.ids.shape[1]), strict=True):
            given = {EMBEDDINGS: embeds[:, begin:end], POSITIONS: positions[:, None, begin:end]}
            logits = runner.feed_seen(ids[:, begin:end], given)[0, -1]
            worst = max(worst, float(np.abs(logits - self.logits[end - 1]).max()))
        return worst / float(np.abs(self.logits).max())


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["dense", "experts"])
def prompt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prompt:
    return Prompt(tmp_path_factory.mktemp("vision"), request.param)


def test_features_and_logits_are_those_of_transformers(prompt: Prompt) -> None:
    found = prompt.encoded()
    assert np.abs(found - prompt.features).max() <= FEATURES * np.abs(prompt.features).max()
    positions = image_positions(prompt.seen, GRIDS, 2)
    assert np.array_equal(positions, prompt.positions)
    assert prompt.error(found, positions) <= LOGITS
    assert prompt.error(found, positions, (9, 10, 22, 24, 29, 30)) <= LOGITS


def test_verify_covers_both_graphs(prompt: Prompt, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", prompt.package, "--lengths", "1", "--decode-steps", "1", "--quiet") == 0
    found = json.loads((prompt.package / "verify/report.json").read_text())
    assert any("images" in output["case"] for output in found["outputs"])
    assert any("features of images" in check["name"] and check["passed"] for check in found["checks"])


def test_another_merger_is_told(prompt: Prompt, tmp_path: Path) -> None:
    """A model whose merger takes the patches of a square in another order."""
    package = open_package(prompt.package)
    model = Path(package.manifest["config"]["model"])
    shutil.copytree(model, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.visual.merger.linear_fc1.weight"
    tensors[name] = tensors[name].unflatten(1, (4, -1)).flip(1).flatten(1).contiguous()
    options = ExportOptions(str(model), vision=True)
    assert vision_check(package, options).passed
    save_file(tensors, file, {"format": "pt"})
    assert not vision_check(package, ExportOptions(str(tmp_path / "model"), vision=True)).passed


def test_an_encoder_that_cannot_be_loaded_is_one_sentence(prompt: Prompt, tmp_path: Path) -> None:
    with planted(open_package(prompt.package), tmp_path / "other") as folder:
        (folder / "vision.onnx").write_bytes(b"no graph")
    with pytest.raises(RunError, match=r"ONNX Runtime cannot load .*vision\.onnx"):
        vision_check(open_package(folder), ExportOptions(open_package(folder).manifest["config"]["model"], vision=True))


def test_text_alone_says_what_it_leaves_out(prompt: Prompt) -> None:
    model = open_package(prompt.package).manifest["config"]["model"]
    assert "tensors of images" in open_source(model).left_out()
    runner = OrtModel(prompt.package)
    runner.start(1)
    with pytest.raises(RunError, match="position_ids"):
        runner.feed_seen(np.zeros((1, 2), np.int64), {"other": np.zeros(1)})


def test_refusals(prompt: Prompt, tmp_path: Path) -> None:
    model = Path(open_package(prompt.package).manifest["config"]["model"])
    with pytest.raises(ConfigError, match="--vision is for ort-cpu"):
        plan_job("trt", {"model": str(model), "vision": True})
    with pytest.raises(ConfigError, match="--vision is not for --speculate"):
        ExportOptions(str(model), vision=True, speculate=4)

    def changed(change: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    for change, error, words in (
        (lambda config: config.pop("vision_config"), UnsupportedModelError, "no encoder of images that is covered"),
        (
            lambda config: config["vision_config"].update(num_position_embeddings=49),
            CheckpointError,
            r"model\.visual\.pos_embed",
        ),
        (lambda config: config["vision_config"].update(depth=3), CheckpointError, r"model\.visual\.blocks\.2"),
    ):
        with pytest.raises(error, match=words):
            open_source(changed(change), vision=True)
    with pytest.raises(ValueError, match="image tokens"):
        image_positions(prompt.seen, GRIDS[:1], 2)


TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def save_processor(folder: Path) -> None:
    """transformers' own for Qwen3.5, of the sizes of `vision_model`, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    theirs: Any = pytest.importorskip("transformers")

    words = {word: number for number, word in enumerate(["[UNK]", "What", "is", "this", "?"])}
    named = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    words |= {f"w{number}": number for number in range(5, IMAGE - 2)} | {n: IMAGE - 2 + i for i, n in enumerate(named)}
    held = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    held.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = theirs.PreTrainedTokenizerFast(
        tokenizer_object=held, unk_token="[UNK]", additional_special_tokens=list(named)
    )
    sizes: dict[str, Any] = dict(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    images, videos = theirs.Qwen2VLImageProcessor(**sizes), theirs.Qwen3VLVideoProcessor(**sizes)
    theirs.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)


def test_the_example_answers_as_transformers_does(
    prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of docs/guide/onnxruntime.md as it stands there, with an image of a file."""
    pytest.importorskip("torchvision", reason="transformers' processor of images")
    image = pytest.importorskip("PIL.Image")
    drawn = np.random.default_rng(3).integers(0, 256, (30, 45, 3), np.uint8)
    image.fromarray(drawn).save(tmp_path / "cat.jpg")
    folder = Path(open_package(prompt.package).manifest["config"]["model"])
    save_processor(folder)
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guide/onnxruntime.md").read_text(encoding="utf-8"), re.S
    )
    monkeypatch.chdir(tmp_path)
    answers: list[np.ndarray] = []
    own = OrtModel.feed_seen

    def noted(*given: Any) -> np.ndarray:
        answers.append(own(*given))
        return answers[-1]

    monkeypatch.setattr(OrtModel, "feed_seen", noted)
    names: dict[str, Any] = {"MODEL": str(folder), "VISION": str(prompt.package)}
    exec(compile(program, "onnxruntime.md", "exec"), names)
    asked = {name: torch.from_numpy(np.asarray(x)) for name, x in names["asked"].items()}
    ids, pixels = asked["input_ids"], asked["pixel_values"].double()
    assert len(answers) == 21 and (ids == IMAGE).sum() > 4
    for answer in answers[:6]:
        with torch.no_grad():
            found = prompt.model(input_ids=ids, pixel_values=pixels, image_grid_thw=asked["image_grid_thw"],
                                 mm_token_type_ids=(ids == IMAGE).int(), use_cache=False).logits[0, -1].numpy()  # fmt: skip
        assert np.abs(answer[0, -1] - found).max() <= LOGITS * np.abs(found).max()
        ids = torch.cat((ids, torch.tensor([[found.argmax()]])), 1)
