"""Train the small softmax model that assets/ holds linearized: a Llama of 2.4 M parameters that finds facts in 4096 tokens.

python tools/train_small.py TEXTS_FOLDER OUTPUT --minutes 4     (or --steps N: progress by steps, not by the clock; needs a GPU to be quick)

Half of the rows are public text, half synthetic retrieval. Its own selection loss trains along: heads learn to mark, by attending to
themselves, the tokens that later queries will look for. That costs the softmax model nothing and makes it fit for STILL.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from still_export.evaluation.evaluate import EvaluationOptions, retrieval
from still_export.linearization.adapter import still_parameters
from still_export.linearization.objectives import watched_positions
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.modes import make_trainable
from still_export.mixers.trainable import SOFTMAX
from still_export.models import attach_untrained
from still_export.texts.files import read_text
from still_export.texts.tasks import TASKS, TaskWriter, Weighing
from still_export.texts.texts import Batches, read_corpus

VOCABULARY, CONTEXT = 1024, 4096
PHASES = ((0.0, 256, 192), (0.3, 512, 128), (0.6, CONTEXT, 32))
"""Beginning as a share of the run, tokens and rows of a batch: finding things is learned quicker in short texts."""
PEAK_RATE, SELECTION_WEIGHT, SELECTION_ROWS = 2e-3, 0.2, 8
TEXTS = ("moby_dick.txt", "shakespeare.txt", "state_of_the_union.txt", "enwik8.txt")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCABULARY entries; numbers are cut into pairs of digits, which are tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    pairs = pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pairs, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    numbers = " ".join(f"{n:02}" for n in range(100))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *[numbers] * 20_000], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


def make_model(end: int) -> LlamaForCausalLM:
    """The untrained model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


class Steps(Dataset):
    """Batches by step, for worker processes."""

    def __init__(self, batches: Batches, first: int) -> None:
        self.batches, self.first = batches, first

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batches.batch(self.first + index)
        return batch.ids, batch.weights


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--text-megabytes", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="Of the batch sizes.")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.output.mkdir(parents=True, exist_ok=True)

    files = []
    for name in TEXTS:
        path = options.output / name
        path.write_text(read_text(options.texts / name)[: options.text_megabytes << 20], encoding="utf-8")
        files.append(path)
    tokenizer = train_tokenizer([path.read_text(encoding="utf-8")[: 2 << 20] for path in files])
    corpus = read_corpus(files, tokenizer, VOCABULARY, 0.005)
    for path in files:
        path.unlink()
    print(f"{len(corpus.train):,} tokens of text, {corpus.bytes_per_token:.2f} bytes each", flush=True)

    model = make_model(tokenizer.eos_token_id)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    # The STILL model shares the softmax model's weights; only the softmax mode of its attention is used here.
    attached = attach_untrained(model, StillConfig()).to(device)
    attentions = make_trainable(attached)
    for attention in attentions:
        attention.mode = SOFTMAX
    still = {id(p) for _, p in still_parameters(attached)}
    trained = [p for p in attached.parameters() if id(p) not in still]
    optimizer = torch.optim.AdamW(
        trained, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05, fused=device.type == "cuda"
    )
    asked = EvaluationOptions(depths=5, samples=6, lengths=(CONTEXT,))
    haystack = {"text": tokenizer.decode(corpus.held_out[:40_000].tolist())}

    def accuracy(length: int) -> dict[str, float]:
        attached.eval()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            rows = {task: retrieval(attached, tokenizer, task, length, asked, haystack) for task in TASKS}
        attached.train()
        return {task: sum(row) / len(row) for task, row in rows.items()}

    started, step, phase, history = time.perf_counter(), 0, -1, []
    loader = iter(())
    while True:
        elapsed = time.perf_counter() - started
        done = step / options.steps if options.steps else elapsed / (60 * options.minutes)
        if done >= 1:
            break
        wanted = sum(done >= begin for begin, _, _ in PHASES) - 1
        if wanted != phase:
            phase = wanted
            _, tokens, rows = PHASES[phase]
            rows = max(1, round(rows * options.scale))
            batches = Batches(
                corpus, TaskWriter(tokenizer, corpus.train), rows, tokens, options.seed, 0.5, Weighing(10.0)
            )
            workers = 12 if device.type == "cuda" else 0
            loader = iter(
                DataLoader(Steps(batches, step), batch_size=None, num_workers=workers, pin_memory=workers > 0)
            )
        rate = PEAK_RATE * min(1.0, (step + 1) / 100, 0.05 + 1.6 * (1 - done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = (x.to(device, non_blocking=True) for x in next(loader))
        watched = tokens == CONTEXT  # shorter texts lie mostly within the window
        queries = watched_positions(ids[:SELECTION_ROWS], weights[:SELECTION_ROWS]) if watched else None
        for attention in attentions:
            attention.selection_queries = queries
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = attached(ids, use_cache=False).logits
        losses = cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        main_loss = (losses * weight).sum() / weight.sum()
        selection = main_loss.new_zeros(())
        if watched:
            selection = torch.stack([a.selection for a in attentions if a.selection is not None]).mean()
        optimizer.zero_grad(set_to_none=True)
        (main_loss + SELECTION_WEIGHT * selection).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            text, answers = losses[weight == 1].mean(), losses[weight > 1].mean()
            line = {
                "step": step,
                "seconds": round(time.perf_counter() - started, 1),
                "tokens": ids.shape[1],
                "text": round(text.item() / math.log(2) / corpus.bytes_per_token, 4),
                "answers": round(answers.item(), 4),
                "selection": round(selection.item(), 4),
            }
            if watched and step % 300 == 0:
                line |= accuracy(CONTEXT)
            history.append(line)
            print(json.dumps(line), flush=True)
    final = {"steps": step, "seconds": time.perf_counter() - started, **accuracy(CONTEXT)}
    print(json.dumps(final), flush=True)
    own = {n: p for n, p in attached.state_dict().items() if n in dict(model.named_parameters())}
    model.load_state_dict(own, strict=False)
    model.to(torch.float16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    (options.output / "training.json").write_text(json.dumps({"final": final, "history": history}, indent=1))


if __name__ == "__main__":
    main()
