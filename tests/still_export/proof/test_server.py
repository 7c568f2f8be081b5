"""Proof of a running server: a right one passes, and one with a fault in each way that prompts come fails in that way."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from still_export.proof.server import Reference, ServerProof, logprobs_of, read_reference
from still_export.proof.server_client import Answer
from tests.still_export.linear_models import linear_model
from tests.still_export.training import byte_tokenizer

LENGTHS = (5, 40, 65)


def peaked_model() -> Any:
    """A random model whose answers depend on every token and position of a prompt."""
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, bos_token_id=None, eos_token_id=256, **sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(20)
    return model


class Standin:
    """PyTorch behind the interface of a server, right or with one fault."""

    tokens = True

    def __init__(self, model: Any, reference: Reference, fault: str = "") -> None:
        self.model, self.reference, self.fault = model, reference, fault
        self.kept: list[list[int]] = []
        self.running: list[list[int]] = []
        self.lock, self.together = threading.Lock(), threading.Barrier(2, timeout=0.2)

    def ask(self, prompt: str | list[int], most: int) -> Answer:
        ids = list(prompt)
        shift = 0
        common = max((shared(ids, old) for old in self.kept), default=0)
        known = [old for old in self.kept if shared(ids, old) == len(old) < len(ids)]
        if self.fault == "again" and ids in self.kept:
            ids = ids[:-2] or ids
        if self.fault == "in turns" and any(len(old) > 20 and len(ids) - len(old) > 20 for old in known):
            ids = ids[:-16] + ids[-8:]
        if self.fault == "in pieces" and any(len(old) < len(ids) <= len(old) + 2 for old in known):
            ids = ids[:-1]
        if self.fault == "edited" and 2 < common < len(prompt) and not known and len(ids) > 20:
            shift = 3
        if self.fault == "in a batch":
            with self.lock:
                self.running.append(ids)
            try:
                self.together.wait()
                ids = next((other for other in reversed(self.running) if other != ids), ids)
            except threading.BrokenBarrierError:
                self.together.reset()
        self.kept.append(list(prompt))
        return self.greedy(ids, most, common if shift else len(ids), shift)

    def greedy(self, ids: list[int], most: int, border: int, shift: int) -> Answer:
        said: list[int] = []
        with torch.no_grad():
            while len(said) < most and (not said or said[-1] != 256):
                every = torch.tensor([[*ids, *said]])
                places = torch.arange(every.shape[1])[None]
                places = torch.where(places >= border, places + shift, places)
                said.append(
                    int(self.model(input_ids=every, position_ids=places, use_cache=False).logits[0, -1].argmax())
                )
        ended = said[-1] == 256
        return Answer(self.reference.text(said), len(said), ended)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(peaked_model(), byte_tokenizer(), None, [256])


@pytest.mark.parametrize("fault", ["", "again", "in turns", "in pieces", "edited", "in a batch"])
def test_a_fault_in_a_way_fails_that_way(reference: Reference, fault: str) -> None:
    server = Standin(reference.model, reference, fault)
    found = ServerProof(server, reference, LENGTHS, answer_tokens=6).run()
    failed = {way.name for way in found if not way.passed}
    assert {way.name for way in found if way.tokens} == {
        "alone",
        "again",
        "in turns",
        "edited",
        "in pieces",
        "in a batch",
    }
    assert (fault in failed and "alone" not in failed) if fault else not failed, [way.wrong for way in found]


def test_a_text_that_no_likely_token_begins_is_told(reference: Reference) -> None:
    found = reference.evaluate([65, 66, 67], Answer("\u4e16\u754c", 6, False))
    assert "after" in found.lost or (found.best - found.chosen).max() > 1


def test_log_probabilities_are_held_to_the_file(reference: Reference) -> None:
    ids = [72, 101, 108, 108, 111]
    right = Standin(reference.model, reference).ask(ids, 4)
    row = reference.evaluate(ids, right)
    told = Answer(right.text, right.count, right.ended, tuple(row.chosen - [0, 0, 0.2, 0]))

    class Tells(Standin):
        def ask(self, prompt: str | list[int], most: int) -> Answer:
            return told if list(prompt) == ids and most == 4 else super().ask(prompt, most)

    proof = ServerProof(Tells(reference.model, reference), reference, (5,), answer_tokens=4)
    proof._prompts = lambda way: [ids]  # type: ignore[method-assign]
    alone = proof.run()[0]
    assert not alone.passed and "token 2 is 0.2 off" in alone.wrong[0]


def test_a_folder_with_code_of_its_own_is_read_here_and_nobody_is_asked(tmp_path: Path) -> None:
    """In 16 bits, whose run in PyTorch says how much is rounding; transformers has no class of the family."""
    model = linear_model(
        "rwkv7qwen2", vocab_size=257, torch_dtype="bfloat16", auto_map={"AutoConfig": "configuration_own.Config"}
    )
    model.tensors = {name: tensor.bfloat16() for name, tensor in model.tensors.items()}
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found, notes = read_reference(tmp_path)
    assert notes == ["transformers does not read this file: the reference was read by this project's own reader"]
    assert found.own is not None and next(found.model.parameters()).dtype == torch.float32
    ids = [5, 6, 7, 8]
    rounded, right = found.own(ids), logprobs_of(found.model, ids)
    assert 0 < abs(rounded - right).max() < 0.5
