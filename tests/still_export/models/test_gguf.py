"""GGUF files of every architecture are the models that they were made of, and what a file has that nothing reads is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig

from still_export.errors import CheckpointError, StillExportError, UnsupportedModelError
from still_export.gguf.architectures import ARCHITECTURES as READ
from still_export.models.build import family_of
from still_export.models.description import describe_model
from still_export.models.load import open_source
from still_export.targets.export import plan_job
from tests.still_export.linear_models import SIZES, linear_model
from tests.still_export.models import gguf_files
from tests.still_export.models.gguf_files import ARCHITECTURES, write_gguf
from tests.still_export.tiny import plain_model, random_ids

EXPERTS: dict[str, Any] = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14)
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(EXPERTS, shared_expert_intermediate_size=18),
    "qwen3_5_moe_text": dict(SIZES["qwen3_5_text"], **EXPERTS, shared_expert_intermediate_size=18),
    "lfm2_moe": dict(
        EXPERTS, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, tie_word_embeddings=True
    ),
    "granitemoehybrid": dict(num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=18),
    "falcon_h1": dict(mamba_norm_before_gate=False, tie_word_embeddings=False),
    "mamba": dict(use_bias=False),
    "mamba2": dict(time_step_limit=(0.0, float("inf")), num_heads=6, head_dim=8),
    "smollm3": dict(no_rope_layers=[1, 1, 1]),
    "phi3": dict(head_dim=4),
    "kimi_linear": dict(
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_local_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=14,
    ),
    "gemma3_text": dict(layer_types=["sliding_attention"] * 3),
    "mistral": dict(sliding_window=None),
    "rwkv6": dict(rescale_every=2),
}
APART = ("granite", "jamba", "kimi_linear", "nemotron_h", "rwkv6", "rwkv6qwen2", "rwkv7")
FAMILIES = [name for name in ARCHITECTURES if name not in APART]


def made(family: str) -> Any:
    changes = CHANGES.get(family, {})
    if family_of(family).linear:
        model = linear_model(family, **changes)
        if family not in ("rwkv6", "rwkv6qwen2", "rwkv7"):
            model.config._experts_implementation = "eager"  # the others want sizes that are multiples
        return model
    return plain_model(family, torch.float32, **changes)


def opened(path: Path, family: str) -> Any:
    return open_source(path, attach_untrained=not family_of(family).linear)


@pytest.mark.parametrize("family", [*FAMILIES, *APART[1:]])
def test_a_file_is_the_model(family: str, tmp_path: Path) -> None:
    """Against transformers' own class; dimensions all differ."""
    model = made(family)
    write_gguf(tmp_path / "m.gguf", model)
    read = opened(tmp_path / "m.gguf", family).read()
    ids = random_ids(1, 15)
    with torch.no_grad():
        want, got = model(ids).logits, read(ids).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_bamba_rotates_half_whatever_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rotates half of each head in every Bamba; llama.cpp's converter writes all where config.json says nothing."""
    model = made("bamba")
    size = model.config.hidden_size // model.config.num_attention_heads
    found = {}
    for count in (size // 2, size, size // 4):
        path = tmp_path / f"{count}.gguf"
        monkeypatch.setitem(gguf_files.ROTATED_OF, "bamba", count / size)
        write_gguf(path, model)
        if count == size // 4:
            with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count"):
                open_source(path)
        else:
            found[count] = open_source(path).read()(random_ids(1, 15)).logits
    assert torch.equal(found[size], found[size // 2])


def test_granite_with_and_without_positions(tmp_path: Path) -> None:
    """llama.cpp takes rope.scaling.finetuned for the switch of positions; transformers' Granite has them."""
    torch.manual_seed(0)
    scales = dict(attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0)
    sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6)
    config = GraniteConfig(
        **sizes, **scales, num_key_value_heads=2, initializer_range=0.4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    found = {}
    for rotates in (None, True, False):
        path = tmp_path / f"{rotates}.gguf"
        write_gguf(path, model, extra=lambda w, r=rotates: None if r is None else w.add_rope_scaling_finetuned(r))
        found[rotates] = open_source(path).read()(random_ids(1, 15)).logits
    want = model(random_ids(1, 15)).logits
    assert (found[True] - want).abs().max() <= 1e-5 * want.abs().max()
    assert torch.equal(found[None], found[True])
    assert (found[False] - want).abs().max() > 1e-2 * want.abs().max()


def test_every_architecture_is_tried() -> None:
    assert set(READ) - set(ARCHITECTURES.values()) == {"olmo2", "nemotron_h"}


@pytest.mark.parametrize("add, said", [
    (lambda w: w.add_float32("qwen3.attention.scale", 0.3), "attention.scale=0.3"),
    (lambda w: w.add_uint32("qwen3.attention.sliding_window", 7), "attention.sliding_window=7"),
    (lambda w: w.add_causal_attention(False), "attention.causal=False"),
    (lambda w: w.add_float32("qwen3.final_logit_softcapping", 30.0), "final_logit_softcapping"),
    (lambda w: w.add_float32("qwen3.a_new_scale", 1.0), "a_new_scale"),
    (lambda w: w.add_float32("qwen3.attention.clamp_kqv", 2.0), "clamp_kqv"),
    (lambda w: w.add_string("qwen3.rope.scaling.type", "longrope"), "longrope"),
    (lambda w: w.add_float32("qwen3.rope.scaling.yarn_attn_factor", 1.2), "yarn_attn_factor"),
    (lambda w: w.add_tensor("blk.1.attn_sinks.weight", np.ones(6, np.float32)), "attn_sinks"),
    (lambda w: w.add_tensor("rope_freqs.weight", np.full(5, 3, np.float32)), "rope_freqs"),
    (lambda w: w.add_tensor("blk.0.attn_q.zero", np.ones(1, np.float32)), "attn_q.zero"),
])  # fmt: skip
def test_what_nothing_reads_is_refused_by_name(add: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", plain_model("qwen3", torch.float32), extra=add)
    with pytest.raises(UnsupportedModelError, match=said.replace(".", r"\.")):
        open_source(tmp_path / "m.gguf", attach_untrained=True)


def test_keys_that_change_nothing_pass(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_causal_attention(True)
        writer.add_uint32("qwen3.attention.sliding_window", 0)
        writer.add_uint32("qwen3.expert_count", 0)
        writer.add_vocab_size(61)
        writer.add_string("general.quantized_by", "someone")
        writer.add_string("quantize.imatrix.file", "x.dat")

    write_gguf(tmp_path / "m.gguf", plain_model("qwen3", torch.float32), extra=add)
    open_source(tmp_path / "m.gguf", attach_untrained=True)


@pytest.mark.parametrize("family, biased", [("llama", "qkv"), ("llama", "q"), ("qwen3", "v"), ("qwen2", "")])
def test_biases_that_a_file_lacks_are_zero(family: str, biased: str, tmp_path: Path) -> None:
    """Of the projections that a family gives biases together."""
    changes = {} if family == "qwen2" else {"attention_bias": True}
    model = plain_model(family, torch.float32, **changes)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("proj.bias") and not any(f".{part}_proj" in name for part in biased):
                tensor.zero_()

    def add(writer: Any) -> None:
        original = writer.add_tensor
        writer.add_tensor = lambda name, data, **more: (
            original(name, data, **more) if not name.endswith("bias") or np.any(data) else None
        )

    write_gguf(tmp_path / "m.gguf", model, extra=add)
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {name[11] for name in names if name.endswith("bias")} == set(biased)
    ids = random_ids(1, 9)
    read = open_source(tmp_path / "m.gguf", attach_untrained=True).read()
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("most", [4, 11])
def test_parts_of_a_split_file(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part names the model; a lost one, or one of another model, is said."""
    original = gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", lambda path, arch: original(path, arch, split_max_tensors=most))
    write_gguf(tmp_path / "m.gguf", model := plain_model("qwen3", torch.float32, tie_word_embeddings=False))
    parts = sorted(tmp_path.glob("m-*.gguf"))
    ids = random_ids(1, 7)
    for part in (parts[0], parts[-1]):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        blob = part.rename(tmp_path / "blobs" / part.stem)  # as in Hugging Face's cache
        part.symlink_to(blob)
        assert plan_job("onnx", {"model": str(part), "attach_untrained": True}).export_options.model == str(part)
        read = open_source(part, attach_untrained=True).read()
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count"):
        open_source(tmp_path / "alone.gguf", attach_untrained=True)
    with pytest.raises(CheckpointError, match=r"00001-of-.*missing"):
        open_source(parts[1], attach_untrained=True)
    parts[1].rename(parts[0])
    with pytest.raises(CheckpointError):
        open_source(parts[-1], attach_untrained=True)


@pytest.mark.parametrize("keys, template, ends", [
    ({"eos": 2}, "", [2]),
    ({"eos": 2, "eot": 4}, "", [2, 4]),
    ({"eos": 2, "eot": 2, "eom": 5}, "", [2, 5]),
    ({"eos": 2}, "{{ '<|im_end|>' }}", [2, 7]),
    ({"eos": 7}, "{{ '<|im_end|>' + '<|eot_id|>' }}", [7]),
    ({"eos": 2}, "no end", [2]),
])  # fmt: skip
def test_tokens_that_end_an_answer(keys: dict[str, int], template: str, ends: list[int], tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" if i != 7 else "<|im_end|>" for i in range(61)])
        for name, token in keys.items():
            getattr(writer, f"add_{name}_token_id")(token)
        if template:
            writer.add_chat_template(template)

    write_gguf(tmp_path / "m.gguf", plain_model("qwen3", torch.float32), extra=add)
    outline = open_source(tmp_path / "m.gguf", attach_untrained=True).outline()
    assert sorted(describe_model(outline)["eos_token_ids"]) == sorted(ends)


def test_llama_3_by_its_table(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = plain_model("llama", torch.float32, rope_parameters=rope, head_dim=32, max_position_embeddings=16384)
    plain = 5e5 ** -(torch.arange(0, 32, 2) / 32)
    table = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert table.max().round(3) == 32 and table.min().round(3) == 1 and len(np.unique(table.round(3))) > 2
    write_gguf(tmp_path / "m.gguf", model, extra=lambda w: w.add_tensor("rope_freqs.weight", table))
    read = open_source(tmp_path / "m.gguf", attach_untrained=True).read()
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_yarn_without_its_first_context_has_the_models(tmp_path: Path) -> None:
    """As in llama.cpp."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    model = plain_model("llama", torch.float32, rope_parameters=rope)

    def add(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    write_gguf(tmp_path / "m.gguf", model, extra=add)
    read = open_source(tmp_path / "m.gguf", attach_untrained=True).read()
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("damage", ["token outside", "block too far", "table too short", "adapter"])
def test_files_that_are_no_model(damage: str, tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        if damage == "token outside":
            writer.add_eos_token_id(61)
        elif damage == "adapter":
            writer.add_type("adapter")
        elif damage == "table too short":
            writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
        else:
            writer.add_tensor("blk.3.attn_norm.weight", np.ones(24, np.float32))

    write_gguf(tmp_path / "m.gguf", plain_model("qwen3", torch.float32), extra=add)
    said = {"token outside": "61", "block too far": r"blk\.3", "table too short": "has 4 rotary", "adapter": "adapter"}
    with pytest.raises(StillExportError, match=said[damage]):
        open_source(tmp_path / "m.gguf", attach_untrained=True)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_blocks_that_move_whole_stay(family: str, kind: str, tmp_path: Path) -> None:
    """Rows of heads, blocks of reordered heads, and rows of several tensors: blocks are the values, the file's in another order."""
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    if family == "kimi_linear":
        sizes |= dict(num_key_value_heads=4)
    if family.startswith("qwen3"):
        sizes |= dict(linear_value_head_dim=32, linear_key_head_dim=16)
    if family == "qwen3_next":
        sizes |= CHANGES[family]
    model = plain_model(family, torch.float32, **sizes) if family == "llama" else linear_model(family, **sizes)
    type_ = gguf.GGMLQuantizationType[kind]

    def coded(name: str, value: torch.Tensor) -> Any:
        wide = value.dim() == 2 and value.shape[-1] % 32 == 0 and "norm" not in name
        return (gguf.quants.quantize(value.numpy(), type_), type_) if wide else None

    write_gguf(tmp_path / "m.gguf", model, coded)
    source = opened(tmp_path / "m.gguf", family)
    want = dict(model.named_parameters())
    held = {name: weight for name, weight in source.weights.items() if getattr(weight, "blocks", None) is not None}
    assert sum(".self_attn." in name or ".linear_attn." in name for name in held) >= 6
    for name, weight in held.items():
        values = weight.read().numpy()
        assert np.abs(weight.blocks.read().dequantized() - values).max() <= 1e-6 * np.abs(values).max(), name
        if name in want:
            error = np.abs(values - want[name].detach().numpy()).max()
            assert error <= np.abs(values).max() * (0.13 if kind == "Q4_0" else 0.01), name
