"""Linear families against transformers' own classes: one forward in float64 without a cache, whole and in pieces; what is refused."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.folders.families import NOT_COVERED
from still_export.mixers.cache import StillCache
from still_export.models import attach_untrained
from still_export.models.build import family_of
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.families.linear_names import language_model
from still_export.models.load import load_model
from still_export.models.read.roles import weight_roles
from still_export.systems.nats_l.family import NATS
from tests.docs.pages import ROOT
from tests.still_export.expert_models import SPARSE, expert_model
from tests.still_export.files import edit_json, read_json
from tests.still_export.fla_models import SOFTMAX
from tests.still_export.linear_models import FAMILIES, SIZES, VOCAB, linear_config, linear_model
from tests.still_export.routed_models import RoutedModel
from tests.still_export.tiny import behind_padding, padded

LOGITS, STATES = 2e-5, 1e-5
"""Of the largest number; float32 against transformers in float64, whose rules compute in float32 all the same."""


NAMES = (*FAMILIES, *(f"{name}, experts" for name in SPARSE))
"""Families, and those with experts by a name of SPARSE."""


def model_of(name: str, seed: int = 0) -> Any:
    """A random model of a name of NAMES."""
    name, experts, _ = name.partition(", experts")
    return expert_model(name, seed=seed) if experts else linear_model(name, seed=seed)


@cache
@torch.no_grad()
def calm(family: str) -> tuple[int, torch.Tensor]:
    """Seed of the first random model that transformers' own float32 follows well, and its logits in float64: others multiply rounding,
    whoever computes."""
    for seed in range(16):
        model = model_of(family, seed)
        found = model(ids(), use_cache=False).logits
        expected = model.double()(ids(), use_cache=False).logits
        if far(found, expected) <= LOGITS / 3:
            return seed, expected
    raise AssertionError(f"{family}: transformers' own float32 loses too much of 16 random models")


def calm_seed(family: str) -> int:
    return calm(family)[0]


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """A family's model as transformers has it, in float64, and ours of the folder that it wrote, in float32."""
    model = model_of(request.param, calm_seed(request.param))
    model.save_pretrained(tmp_path)
    return model.double(), load_model(tmp_path)


TOKENS = 136
"""Two whole chunks of 64 and a part of the third."""
PIECES = [70, 1, 65]


def ids(rows: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def pieces(model: Any, tokens: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, StillCache]:
    """Logits of all tokens, fed in pieces, and the cache after them."""
    cache, logits = StillCache.empty(model.config), []
    for piece in tokens.split(sizes, dim=1):
        logits.append(model(piece, past_key_values=cache).logits)
    return torch.cat(logits, 1), cache


def demand_steps(model: Any, tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits of 24 tokens of two rows by single steps, and of some behind padded rows of different lengths."""
    assert far(pieces(model, tokens, [1] * 24)[0], expected) <= LOGITS
    for found, right in behind_padding(model, tokens, expected, (17, 9)):
        assert far(found, right) <= LOGITS


@torch.no_grad()
def test_logits_and_states_are_those_of_transformers(pair: tuple[Any, Any], request: pytest.FixtureRequest) -> None:
    theirs, ours = pair
    whole = theirs(ids(), use_cache=True)
    seen = next(whole[name] for name in ("cache", "cache_params", "past_key_values") if name in whole)
    name = request.node.callspec.params["pair"]
    _, expected = calm(name)
    assert far(ours(ids(), use_cache=False).logits, expected) <= LOGITS
    for sizes in (PIECES, [1, 2, 3, 2, 1, 127]):
        logits, cache = pieces(ours, ids(), sizes)
        assert far(logits, expected) <= LOGITS, sizes
        compared = () if name.startswith("minimax") else cache.states()  # transformers' cache of it shows none
        for index, states in enumerate(compared):
            if "recurrent_state" in states:
                state = seen.get_recurrent_state(index, state_idx=0)
                state = state[..., None] if state.dim() == 3 else state  # Mamba's, the first
                state = state if state.shape == states["recurrent_state"].shape else state.transpose(2, 3)
                assert far(states["recurrent_state"], state) <= STATES
            if "conv_state" in states:
                columns = seen.get_conv_state(index, state_idx=0)
                assert far(states["conv_state"], columns[..., -states["conv_state"].shape[-1] :]) <= STATES


@torch.no_grad()
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.0, 2e-4), (3e-4, 0.5)])
def test_steps_of_nemotron_h_are_clamped_as_published(limit: tuple[float, float], tmp_path: Path) -> None:
    """Its published code reads time_step_limit; transformers' class clamps to time_step_min."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes: Any = dict(hidden_size=24, intermediate_size=20, num_attention_heads=2, num_key_value_heads=1, head_dim=12)
    sizes |= dict(mamba_num_heads=2, mamba_head_dim=12, ssm_state_size=6, n_groups=1, conv_kernel=3)
    kinds = ["mamba", "attention"]
    config = NemotronHConfig(
        vocab_size=60, layers_block_type=kinds, num_hidden_layers=2, time_step_limit=limit, **sizes
    )
    theirs = NemotronHForCausalLM(config).float().eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("dt_bias"):
            parameter.fill_(-8.0)  # steps of 3.4e-4, below time_step_min
    theirs.save_pretrained(tmp_path)
    ours, tokens = load_model(tmp_path), torch.randint(0, 60, (1, 40))
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limit
    assert far(ours(tokens, use_cache=False).logits, theirs(tokens, use_cache=False).logits) <= LOGITS


@torch.no_grad()
def test_single_steps_and_ragged_rows(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    tokens = ids(tokens=24)
    demand_steps(ours, tokens, theirs(tokens, use_cache=False).logits)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("falcon_h1", {"mamba_rms_norm": False}),
        ("bamba", {}),
        ("kimi_linear", {"q_lora_rank": 9}),
        ("gla", {"use_short_conv": True, "conv_size": 3, "clamp_min": -0.02, "use_output_gate": False, "attn": None}),
        ("gla", {"attn": {**SOFTMAX, "window_size": 37}}),
        ("hgrn2", {"use_short_conv": True, "conv_size": 3, "use_lower_bound": False}),
        ("hgrn", {"use_short_conv": True, "conv_size": 3, "use_lower_bound": False, "expand_ratio": 2}),
        ("retnet", {"use_short_conv": True, "conv_size": 3, "use_output_gate": False, "expand_v": 1.0}),
        ("transnormer", {"bias": True, "glu_dim": -1, "no_scale_embedding": True, "decoder_attention_heads": 6}),
        ("transnormer", {"hidden_dim": 36, "linear_use_lrpe_list": [0, 0, 0], "tie_word_embeddings": True}),
        ("moh_llama", {"shared_heads": 1, "routed_heads": 3}),
        ("inline", {"feature_map": "relu", "qkv_bias": False}),
        ("inline", {"kernel_size": 3}),
        ("polaformer", {"kernel_size": 2, "qkv_bias": False}),
        ("rat", {"chunk_size": 1, "ngroups": 4, "base": 50.0}),
        ("rat", {"interleave_step": 2, "window_size": 19}),
        ("mamba3", {"is_outproj_norm": True, "use_bias": True, "rope_fraction": 1.0, "n_groups": 1}),
        ("parallax", {"num_kv_heads": None, "qkv_bias": False, "qk_norm": False}),
        ("local_linear", {"ridge": 0.5}),
        ("rwkv7", {"fuse_norm": True, "norm_bias": False, "norm_first": False, "value_dim": None}),
        (
            "minicpm_sala",
            dict(
                lightning_nkv=1,
                lightning_scale="1/d",
                attn_use_rope=True,
                attn_use_output_gate=False,
                use_output_gate=False,
                use_output_norm=False,
                qk_norm=False,
                num_key_value_heads=None,
                num_attention_heads=3,
            ),
        ),
        (
            NATS,
            dict(
                decay_for_non_gdn_blocks=False,
                attn_qk_norm=False,
                num_nats_head=1,
                head_dim=12,
                expand_v=0.5,
                seed=1,
            ),
        ),
        # With the seed 0 the formulas' own float32 errs by 3e-5 and 4e-5.
        (NATS, {"allow_neg_eigval": True, "gdn_layers": [], "num_hidden_layers": 2, "seed": 1}),
        (
            "recurrent_gemma",
            {"attention_bias": True, "num_key_value_heads": 3, "block_types": ["attention", "recurrent"]},
        ),
        (
            "recurrent_gemma",
            {"lru_width": 21, "conv1d_width": 2, "attention_window_size": 400, "partial_rotary_factor": 1.0},
        ),
        ("delta_net", {"use_gate": True, "allow_neg_eigval": True}),
        ("gated_deltanet", {"output_gate_activation": "sigmoid", "num_v_heads": None, "attn": SOFTMAX}),
    ],
)
@torch.no_grad()
def test_variants_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = linear_model(family, **changes)
    theirs.save_pretrained(tmp_path)
    expected = theirs.double()(ids(), use_cache=False).logits
    assert far(pieces(load_model(tmp_path), ids(), PIECES)[0], expected) <= LOGITS


@torch.no_grad()
def test_the_formulas_of_recurrent_gemma_are_those_of_transformers(tmp_path: Path) -> None:
    formulas = linear_model("recurrent_gemma")
    formulas.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    assert far(theirs(ids(), use_cache=False).logits, formulas.double()(ids()).logits) <= LOGITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", SIZES)
@torch.no_grad()
def test_half_precision_errs_as_transformers_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Errors of all logits together, each run against float64 with the weights of that type."""
    theirs = linear_model(family).to(dtype)
    theirs.save_pretrained(tmp_path)
    found, rounded = load_model(tmp_path, dtype=dtype), theirs(ids(), use_cache=False).logits.double()
    expected = theirs.double()(ids(), use_cache=False).logits
    own = (rounded - expected).norm()
    for sizes in ([TOKENS], PIECES):
        assert (pieces(found, ids(), sizes)[0].double() - expected).norm() <= 1.5 * own


@torch.no_grad()
def demand_half(theirs: Any, dtype: torch.dtype, folder: Path) -> None:
    """Errors of all logits together, each run against float64 with the weights of that type. Where a model tells, choices are those of
    float64: rounding turns some in either run."""
    theirs.tensors = half = {name: x.to(dtype) for name, x in theirs.tensors.items()}
    theirs.save_pretrained(folder)
    found = load_model(folder, dtype=dtype)
    expected, told = theirs.double()(ids()).logits, iter(())
    if isinstance(theirs, RoutedModel):
        theirs.told = theirs.choices
        told = iter(theirs.told_ids(TOKENS))
        for module in found.modules():
            if hasattr(module, "watch"):
                module.watch = lambda margins: next(told)
    theirs.tensors = half
    own = (theirs(ids()).logits.double() - expected).norm()
    assert (found(ids(), use_cache=False).logits.double() - expected).norm() <= 1.5 * own
    assert next(told, None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SIZES])
def test_half_precision_errs_as_the_formulas_do(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    demand_half(linear_model(family), dtype, tmp_path)


@torch.no_grad()
def test_a_width_is_what_the_first_call_decides(tmp_path: Path) -> None:
    """Routers that hang on the queries decide otherwise by 2 tokens than by 300; padding enters nothing. One block of sinks."""
    theirs = linear_model("flux_qwen3", seed=calm_seed("flux_qwen3"), sink_size=1, local_window_size=128)
    for name, x in theirs.tensors.items():
        if "mask_allocator" in name:
            theirs.tensors[name] = 0 * x if name.endswith("bias") else 3 * x
    theirs.save_pretrained(tmp_path)
    ours, theirs, widths = load_model(tmp_path), theirs.double(), []
    tokens = ids(tokens=420)
    for sizes in ([420], [2, 418], [300, 1, 119]):
        theirs.first = sizes[0]
        expected = theirs(tokens).logits
        widths.append(torch.stack(theirs.full))
        assert far(pieces(ours, tokens, sizes)[0], expected) <= LOGITS, sizes
    assert widths[0].any() and not widths[0].all()
    assert not torch.equal(widths[0], widths[1])
    rows, mask = padded([tokens[0, :300], tokens[1, :2]])
    rows[mask == 0] = 50
    cache = StillCache.empty(ours.config)
    ours(rows, attention_mask=mask, past_key_values=cache)
    after = torch.stack([tokens[0, 300:330], tokens[1, 2:32]])
    logits = ours(after, past_key_values=cache).logits
    for row, first in enumerate((300, 2)):
        theirs.first = first
        assert far(logits[row], theirs(tokens).logits[row, first : first + 30]) <= LOGITS


def test_every_weight_has_a_role(pair: tuple[Any, Any]) -> None:
    assert set(weight_roles(pair[1])) == {name for name, _ in pair[1].named_parameters()}


HYBRIDS = (
    "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp nemotron_h nemotron_h_omni "
    "granitemoehybrid lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl kimi_linear bailing_hybrid minimax falcon_h1 olmo_hybrid "
    "jamba bamba zamba zamba2 zaya mamba mamba2 falcon_mamba recurrent_gemma rwkv xlstm glm5_next inkling_mm_model "
    "inkling2 granite_swa granitemoe_swa"
).split()
"""Models of transformers 5.23 whose layers, or some, have a state that does not grow."""


@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrid_models_are_covered_or_refused_by_name(kind: str) -> None:
    """In a sentence that says why, never as a family that nobody knows."""
    config = AutoConfig.for_model(kind).to_dict()
    kind = language_model(config)["model_type"]
    if kind not in LINEAR_FAMILIES:
        said = f"model_type={kind!r} in config.json is not covered: {NOT_COVERED[kind]}"
        with pytest.raises(UnsupportedModelError, match=re.escape(said)):
            family_of(kind)


def test_the_page_of_published_models_says_so() -> None:
    rows = re.findall(r"^\| .* \| `(\w+)` \| (.*) \|$", (ROOT / "docs/reference/models.md").read_text(), re.M)
    assert sorted(kind for kind, _ in rows[1:]) == sorted(kind for kind in HYBRIDS if not kind.endswith("_text"))
    for kind, said in rows[1:]:
        family = language_model(AutoConfig.for_model(kind).to_dict())["model_type"]
        assert said.startswith("yes") if family in LINEAR_FAMILIES else said == f"no: {NOT_COVERED[family]}", kind


def test_gradients_flow(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    ours(ids(1, 70), labels=ids(1, 70), use_cache=False).loss.backward()
    decide = ("mask_allocator", "nats_layer", "attn.means", "correction_bias")  # a decision has no derivative
    learned = [p for name, p in ours.named_parameters() if not any(part in name for part in decide)]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in learned)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, dict(use_shared_attention_adapter=False, use_mem_rope=False, mamba_ngroups=1)])
def test_two_blocks_that_layers_share_in_turn(changes: dict[str, Any], tmp_path: Path) -> None:
    """In float64: three such layers multiply rounding by more than the bound."""
    sizes = dict(num_mem_blocks=2, num_hidden_layers=3, layer_types=["hybrid"] * 3, add_bias_linear=True)
    theirs = linear_model("zamba2", seed=1, **sizes, **changes)
    theirs.save_pretrained(tmp_path)
    expected = theirs.double()(ids(), use_cache=False).logits
    assert far(pieces(load_model(tmp_path).double(), ids(), PIECES)[0], expected) <= LOGITS


def test_shared_tensors_may_be_in_the_file_of_every_layer(tmp_path: Path) -> None:
    linear_model("zamba2").save_pretrained(tmp_path)
    expected, path = load_model(tmp_path), tmp_path / "model.safetensors"
    name, tensors = "model.layers.{}.shared_transformer.self_attn.o_proj.weight", load_file(path)
    tensors[name.format(3)] = tensors[name.format(1)].clone()
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(load_model(tmp_path)(ids()).logits, expected(ids()).logits)
    tensors[name.format(3)][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj.weight is not the same in all layers"):
        load_model(tmp_path)
    edit_json(tmp_path / "config.json", num_mem_blocks=0)
    with pytest.raises(ConfigError, match="num_mem_blocks=0"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "family", ["olmo_hybrid", "kimi_linear", "mamba2", "gla", "hgrn2", "zamba2", "recurrent_gemma"]
)
def test_an_own_folder_is_read_again(family: str, tmp_path: Path) -> None:
    linear_model(family).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_the_text_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """Qwen3.5 as it is published: the language model is a part, beside images and heads that guess ahead."""
    linear_model("qwen3_5_text").save_pretrained(tmp_path)
    expected = load_model(tmp_path)
    config = read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config}))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items()}
    others = {"mtp.fc.weight": torch.zeros(2, 2), "model.visual.patch_embed.weight": torch.zeros(2, 2)}
    save_file(named | others, tmp_path / "model.safetensors", {"format": "pt"})
    found = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_rwkv7_of_the_first_version(tmp_path: Path) -> None:
    """The shares of the token before in one tensor."""
    model = linear_model("rwkv7")
    model.save_pretrained(tmp_path / "second")
    for layer in range(3):
        at = f"model.layers.{layer}.attn.x_"
        model.tensors[f"{at}x"] = torch.cat([model.tensors.pop(f"{at}{x}")[0] for x in "rwkvag"])
    model.save_pretrained(tmp_path / "first")
    ours, expected = load_model(tmp_path / "first"), load_model(tmp_path / "second")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("family", ["olmo_hybrid", "lfm2", "minimax", "routing_transformer", "granitemoehybrid"])
def test_heads_of_an_odd_size_are_not_turned(family: str, tmp_path: Path) -> None:
    linear_model(family).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", num_attention_heads=8, position_embedding_type="rope")
    with pytest.raises(UnsupportedModelError, match=r"num_attention_heads=8 .*: heads of 3 channels"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", ["nemotron_h", "kimi_linear", "bailing_hybrid"])
def test_a_head_that_transformers_never_ties(family: str, tmp_path: Path) -> None:
    """Its classes read a head of its own where config.json ties the embeddings."""
    theirs = linear_model(family, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert not ours.config.tie_word_embeddings and not torch.equal(
        ours.lm_head.weight, ours.get_input_embeddings().weight
    )
    expected = type(theirs).from_pretrained(tmp_path)(ids(1, 9), use_cache=False).logits.double()
    assert far(ours(ids(1, 9), use_cache=False).logits, expected) < 1e-5


@pytest.mark.parametrize("family", ["granitemoehybrid", "bamba", "jamba"])
def test_odd_heads_that_are_not_turned_whole(family: str) -> None:
    """Without positions, or turned by half."""
    model = linear_model(family, num_attention_heads=8)
    ours = LINEAR_FAMILIES[family].still_config.from_dict(model.config.to_dict())
    assert LINEAR_FAMILIES[family].still_model(ours)(ids(5)).logits.isfinite().all()


def test_what_is_linear_already_is_not_linearized(tmp_path: Path) -> None:
    model = linear_model("lfm2")
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM is linear already"):
        attach_untrained(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a lfm2 model, whose layers are linear already"):
        load_model(tmp_path, attach_untrained=True)
    assert linear_config("lfm2").layer_types == ["conv", "full_attention", "conv"]


def test_what_is_stored_is_the_layers_own() -> None:
    """Until version 0.1 configurations of linear models had the settings of hybrid attention, too."""
    given = {"chunk_size": 32, "capacity_tokens": 100}
    config = LINEAR_FAMILIES["mamba2"].still_config.from_dict(
        {**linear_config("mamba2").to_dict(), "still_config": given}
    )
    stored = {"layer_types": ["mamba2"] * 3, "capacity_tokens": 100, "overflow": "error", "cache": None}
    assert config.still_config == config.still.to_dict() == stored
