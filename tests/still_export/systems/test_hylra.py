"""HyLRA: layers that read the blocks of an earlier layer, against the formula, in pieces, as a package; the measurement; refusals."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from still_export.errors import ConfigError
from still_export.linearization.objectives import make_students
from still_export.mixers.cache import StillCache
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL, SELECTED
from still_export.models import attach_untrained
from still_export.systems.hylra.finder import Reuse, lost_attention
from tests.still_export.mixers.test_block_attention import SMALL, call
from tests.still_export.tiny import behind_padding, plain_model, random_ids
from tests.still_export.training import make_base, make_text
from tests.still_kernels.block_attention.inputs import Layer, attended, chosen

TYPES = (SELECTED, FULL, SELECTED, SELECTED, SELECTED, SELECTED, SELECTED)
REUSE = (0, 1, 0, 0, 4, 4, 0)
"""Two layers that choose, each for others; three layers that read the first one's blocks, so that an export repeats one."""


def reusing(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    plain = plain_model("qwen3", dtype, num_hidden_layers=len(TYPES))
    return attach_untrained(plain, StillConfig(**{**SMALL, "layer_types": TYPES, "reuse": REUSE, **changes}))


def watched(ours: Any) -> dict[int, Any]:
    """By layer what the next call gives the attention of layers 0 and 3, and what it makes of it."""
    seen: dict[int, Any] = {}
    for index in (0, 3):
        module = ours.model.layers[index].self_attn
        module.register_forward_hook(
            lambda m, a, k, out, index=index: seen.update({index: (k.get("hidden_states", *a[:1]), k, out[0])}),
            with_kwargs=True,
        )
    return seen


@torch.no_grad()
def test_a_layer_reads_the_blocks_of_its_source_in_any_split() -> None:
    """Layer 3 by the formula with the choice of layer 0, which its own would not be."""
    ours = reusing()
    ids, seen = random_ids(1, 130), watched(ours)
    whole = ours(ids, use_cache=False).logits
    parts = {}
    for index, (hidden, given, _) in seen.items():
        module = ours.model.layers[index].self_attn
        parts[index] = [x[0] for x in module.project_heads(hidden, given["position_embeddings"])]
    c = ours.config
    choice = {name: n for name, n in c.still.block_choice().items() if name != "block_slots"}
    layer = Layer(c.num_attention_heads, c.num_key_value_heads, module.head_dim, choice=choice)
    blocks = {index: chosen(layer, *parts[index][:2])[0] for index in parts}
    found = seen[3][2][0]
    expected = module.o_proj(attended(layer, *parts[3], blocks[0]).flatten(1))
    own = module.o_proj(attended(layer, *parts[3], blocks[3]).flatten(1))
    assert (found - expected).abs().max() <= 1e-9 < 1e-4 < (found - own).abs().max()
    cache = StillCache.empty(c)
    pieces = [ours(piece, past_key_values=cache).logits for piece in ids.split([70, 1, 19, *[1] * 40], dim=1)]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 1e-9
    assert [name for name, layer in enumerate(cache.layers) if "key_sum" in layer.states()] == [0, 4]


@torch.no_grad()
def test_single_tokens_are_chosen_by_softmax_itself() -> None:
    """Blocks of one token: of each key/value head the first token, the own one and two before it, and of the others those of the most
    attention; a layer reads those of its source. One token fewer, and the layer's own choice, are seen."""
    ours = reusing(block_size=1, mean_stride=1, mean_length=1, top_blocks=12)
    ids, seen = random_ids(1, 90), watched(ours)
    whole = ours(ids, use_cache=False).logits

    def output(source: int, top: int) -> torch.Tensor:
        """Of layer 3, behind its last projection, with the tokens that layer `source` chooses."""
        heads = {}
        for index in (source, 3):
            module, (hidden, given, _) = ours.model.layers[index].self_attn, seen[index]
            heads[index] = [x[0] for x in module.project_heads(hidden, given["position_embeddings"])]
        (query, key, _), (own, keys, values) = heads[source], heads[3]
        group, rows = query.shape[1] // key.shape[1], torch.zeros_like(own)
        for t, head in product(range(90), range(key.shape[1])):
            part = slice(head * group, (head + 1) * group)
            places = list(range(t + 1))
            if t + 1 >= 24:
                mass = (query[t, part] @ key[: t + 1, head].T * key.shape[-1] ** -0.5).softmax(-1).sum(0)
                always = {0, t - 2, t - 1, t}
                rest = sorted(set(places) - always, key=lambda n, mass=mass: -float(mass[n]))
                places = sorted(always | set(rest[: top - 4]))
            weights = (own[t, part] @ keys[places, head].T * keys.shape[-1] ** -0.5).softmax(-1)
            rows[t, part] = weights @ values[places, head]
        return ours.model.layers[3].self_attn.o_proj(rows.flatten(1))

    found = seen[3][2][0]
    assert (found - output(0, 12)).abs().max() <= 1e-9
    assert (found - output(0, 11)).abs().max() > 1e-4 and (found - output(3, 12)).abs().max() > 1e-4
    cache = StillCache.empty(ours.config)
    pieces = [ours(piece, past_key_values=cache).logits for piece in ids.split([40, 1, 29, *[1] * 20], dim=1)]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 1e-9


@torch.no_grad()
def test_junk_in_the_padding_enters_nothing() -> None:
    ours = reusing()
    ids = random_ids(2, 60)
    expected = ours(ids, use_cache=False).logits
    for found, right in behind_padding(ours, ids, expected, (57, 33)):
        assert (found - right).abs().max() <= 1e-9


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float32", {}), ("float16", {}), ("float32", dict(block_size=1, mean_stride=1, mean_length=1, top_blocks=12))],
)
def test_one_choice_feeds_several_layers_of_a_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, changes: dict[str, int]
) -> None:
    reusing(torch.float32, **changes).save_pretrained(tmp_path / "model")
    package = tmp_path / "package"
    given = ("--dtype", dtype, "--quiet")
    assert call("export", tmp_path / "model", "-o", package, *given) == 0, capsys.readouterr().err
    nodes = onnx.load(package / "model.onnx", load_external_data=False).graph.node
    chosen = [n.output[0] for n in nodes if n.op_type == "SelectBlocks"]
    read = [n.input[3] for n in nodes if n.op_type == "BlockAttention"]
    assert [read.count(name) for name in chosen] == [4, 2]
    given = ("--lengths", "1,100", "--decode-steps", "4", "--quiet")
    assert call("verify", package, *given) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "reuse, message",
    [
        ((0, 1, 3, 3, 4, 4, 0), r"reuse\[2\]=3: layer 2 can read the blocks of layers 0..2"),
        ((0, 1, 1, 0, 4, 4, 0), r"reuse\[2\]=1: layer 1 is full_attention, which has no blocks"),
        ((0, 0, 0, 0, 4, 4, 0), r"reuse\[1\]=0: layer 1 is full_attention"),
        ((0, 1, 0, 2, 4, 4, 0), r"reuse\[3\]=2: layer 2 reads the blocks of layer 0; give 0"),
        ((0, 1, 0), r"reuse has 3 entries for 7 layers: it was made for another model"),
    ],
)
def test_what_does_not_fit_is_named(reuse: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reusing(reuse=reuse)


def test_files() -> None:
    """A layer whose own blocks miss too much is softmax; a layer reads those of an earlier one, where they suffice."""
    lost = [[0.3, 1, 1, 1], [0.5, 0.05, 1, 1], [0.9, 0.065, 0.05, 1], [0.9, 0.2, 0.2, 0.05]]
    found = Reuse.of(lost, "digest")
    assert found.layers == ("full", "own", 1, "own")
    assert found.fields() == {"layer_types": (FULL, SELECTED, SELECTED, SELECTED), "reuse": (0, 1, 1, 3)}


def policies(lost: list[list[float]]) -> dict[tuple[str | int, ...], tuple[int, int, float]]:
    """Every choice of layers that choose, and of each how many are softmax, how many choose, and what is missed."""
    found = {}
    for picked in product((False, True), repeat=len(lost)):
        if any(own and lost[i][i] > 0.1 for i, own in enumerate(picked)):
            continue
        layers: list[str | int] = []
        missed = 0.0
        for i, own in enumerate(picked):
            read = [(lost[i][j], j) for j in range(i) if picked[j] and lost[i][j] <= min(0.1, lost[i][i] + 0.02)]
            layers.append("own" if own else min(read)[1] if read else "full")
            missed += lost[i][i] if own else min(read)[0] if read else 0.0
        found[tuple(layers)] = (layers.count("full"), layers.count("own"), round(missed, 9))
    return found


def test_the_policy_is_the_best_of_all() -> None:
    """Of all policies of seven layers, by what they cost; one that reads the latest choice alone is beaten somewhere."""
    random, beaten = np.random.default_rng(0), 0
    for _ in range(60):
        lost = random.uniform(0.0, 0.14, (7, 7)).round(4)
        lost[np.diag_indices(7)] *= 0.8
        every = policies(lost.tolist())
        found = Reuse.of(lost.tolist(), "digest").layers
        assert every[found] == min(every.values())
        latest = [kinds for kinds in every if all(k == max((j for j in range(i) if kinds[j] == "own"), default=-1)
                                                  for i, k in enumerate(kinds) if isinstance(k, int))]  # fmt: skip
        beaten += every[found] < min(every[kinds] for kinds in latest)
    assert beaten > 5


def test_many_layers_choose_in_time() -> None:
    """Of forty layers that may all choose, each readable by half of the later ones."""
    random = np.random.default_rng(1)
    found = Reuse.of(random.uniform(0.0, 0.1, (40, 40)).tolist(), "digest")
    assert found.layers.count("full") == 0 and found.layers.count("own") < 20


def test_files_are_read_as_written(tmp_path: Path) -> None:
    found = Reuse(("full", "own", 1), ((0.5,), (0.1, 0.05), (0.1, 0.06, 0.05)), "digest")
    found.write(tmp_path / "reuse.json")
    again = Reuse.read(tmp_path / "reuse.json", 3)
    assert again == found
    again.check("reuse.json", "digest")
    with pytest.raises(ConfigError, match="was measured on other weights"):
        again.check("reuse.json", "another")
    with pytest.raises(ConfigError, match="belongs to a model with 3 layers; this one has 4"):
        Reuse.read(tmp_path / "reuse.json", 4)
    (tmp_path / "none.json").write_text(json.dumps({"layers": []}))
    with pytest.raises(ConfigError, match=r"none.json: 'lost'. Give the reuse.json"):
        Reuse.read(tmp_path / "none.json", 4)
    (tmp_path / "odd.json").write_text(json.dumps({"layers": ["own", "most"], "lost": [], "base": ""}))
    with pytest.raises(ConfigError, match=r"layers\[1\]='most'; give full, own, or the number"):
        Reuse.read(tmp_path / "odd.json", 2)


@torch.no_grad()
def test_attention_that_is_missed() -> None:
    """A layer that is another's copy loses by its blocks what it loses by its own; where all blocks are read, nothing is lost."""
    ours = reusing(torch.float32, reuse=None, layer_types=(SELECTED,) * 7)
    ids = random_ids(1, 150)
    lost = lost_attention(ours, make_students(ours), ids)
    assert len(lost) == 7 and all(0 < lost[i][i] < 1 for i in range(7))
    assert (
        sum(lost[i][i] <= lost[i][j] + 1e-6 for i in range(7) for j in range(7)) >= 40
    )  # own ones are mostly the best
    every = reusing(torch.float32, reuse=None, layer_types=(SELECTED,) * 7, top_blocks=30)
    assert max(map(max, lost_attention(every, make_students(every), ids))) == 0


def test_what_is_found_is_what_a_model_is_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two commands one after the other; rows within which every block is read are refused, with the length to type."""
    base, text = make_base(tmp_path / "base"), make_text(tmp_path / "text.txt")
    small = ("--block-size", 16, "--top-blocks", 4, "--local-blocks", 1, "--dense-length", 96, "--quiet")
    given = ("--text", text, "--held-out", 0.2, *small)
    find = ("linearize", base, "--find-reuse", "-o", tmp_path / "layers", *given)
    assert call(*find, "--sequence-length", 128) == 2
    assert (
        "rows of 128 tokens: below dense_length" in (said := capsys.readouterr().err)
        and "--sequence-length 160" in said
    )
    assert call(*find, "--sequence-length", 200) == 0
    assert "layer 0: " in capsys.readouterr().out
    found = json.loads((tmp_path / "layers" / "reuse.json").read_text())
    reuse = ("--mixer", "blocks", "--reuse", tmp_path / "layers" / "reuse.json")
    assert call("linearize", base, *reuse, "-o", tmp_path / "made", *given) == 0, capsys.readouterr().err
    still = json.loads((tmp_path / "made" / "config.json").read_text())["still_config"]
    assert [FULL if kind == "full" else SELECTED for kind in found["layers"]] == still["layer_types"]
