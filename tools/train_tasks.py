"""Train the tiny models of assets/tasks: each remembers, by one state rule, what was written hundreds of tokens ago, to the last symbol.

    python -m tools.train_tasks OUTPUT [--only delta,mamba2] [--scale 1.0] [--seed 0]

Symbols: a token of kind "pair" writes a value under a key, a token "query" asks for the value of a key; the model's next token must be it,
and others say nothing. Old keys are written once, among the first tokens; new ones are written again and again, where the rule can forget.
The recurrences are those of the published definitions, one token after the other (tests/still_export), or of transformers; a model is kept
if it answers each of some thousand queries behind up to TOKENS tokens right, with its weights in float16. A rule takes about ten minutes on
two cores, one or two on a GPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

KEYS, OLD_KEYS, VALUES = 12, 6, 16
QUERY, VALUE, FILLER = KEYS * VALUES, KEYS * VALUES + KEYS, KEYS * VALUES + KEYS + VALUES
VOCABULARY = FILLER + 16
TOKENS = 384
PHASES = ((48, 1500), (128, 800), (TOKENS, 1500))
"""Tokens of a text, and steps at most: memory is learned quicker in short texts. A phase ends when every answer is right."""
CHECKED = 100
"""Steps between two looks at that."""
ROWS, PEAK_RATE = 48, 4e-3
AVERAGED = 0.02
"""Share of the latest weights in their running mean, which is what is looked at and kept: it answers what single steps forget again."""
UNASKED = -100


def texts(
    rows: int, tokens: int, again: bool, generator: np.random.Generator, keys: int = KEYS
) -> tuple[Tensor, Tensor]:
    """Random texts and what follows each token, UNASKED where it is no query; both [rows, tokens].

    Args:
        again: New keys are written again and again; else so many `keys`, each once.
    """
    ids, answers = np.empty((rows, tokens), np.int64), np.full((rows, tokens), UNASKED)
    order = generator.random((rows, KEYS)).argsort(1)
    old = OLD_KEYS if again else keys
    kept, every = np.full((rows, KEYS), -1), np.arange(rows)
    first = np.zeros(rows, np.int64)  # of the old keys, that waits to be written
    for t in range(tokens):
        kind, value = generator.random(rows), generator.integers(VALUES, size=rows)
        begins = (first < old) & (kind < 0.5)
        writes = begins | (again & (first >= old) & (kind < 0.3))
        new = order[every, old + generator.integers(KEYS - old, size=rows)] if again else order[:, 0]
        written = np.where(begins, order[every, np.minimum(first, old - 1)], new)
        asked = np.where(kept >= 0, generator.random((rows, KEYS)), -1).argmax(1)
        asks = ~writes & (kind < 0.7) & (kept >= 0).any(1)
        ids[:, t] = np.where(writes, written * VALUES + value, np.where(asks, QUERY + asked, FILLER + value))
        answers[asks, t] = VALUE + kept[every, asked][asks]
        kept[every[writes], written[writes]] = value[writes]
        first += begins
    return torch.from_numpy(ids), torch.from_numpy(answers)


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """How a parameter of that name starts."""
    if ("norm" in name and name.endswith("weight")) or name.endswith(("k_k", "k_a")):
        return torch.ones(shape)
    if name.endswith("gk_proj.1.bias"):
        return torch.full(shape, 6.0)  # a gate of 0.9998 a token: what is written first is there behind the last
    if name.endswith("dt_bias"):
        return torch.full(shape, -7.0)  # 0.9991 a token
    if name.endswith(("bias", "r_k")) or ".lora.2." in name:
        return torch.zeros(shape)
    if name.endswith((".x_r", ".x_w", ".x_k", ".x_v", ".x_a", ".x_g")):
        return torch.zeros(shape)
    if name.endswith("A_log"):
        return torch.zeros(shape)
    if name.endswith("conv1d.weight"):
        weight = torch.randn(shape) * 0.1
        weight[..., -1] = 1
        return weight
    return torch.randn(shape) * (0.3 if "embed" in name else shape[-1] ** -0.5)


@dataclass(frozen=True)
class Rule:
    """A state rule: how its model is made (logits of ids, and its parameters), whether it can forget one key, how many keys a text has that
    are written once, and how it is trained."""

    make: Callable[[], Any]
    again: bool
    keys: int = KEYS
    peak_rate: float = PEAK_RATE
    phases: tuple[tuple[int, int], ...] = PHASES


SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)


def _fla(family: str, **sizes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from tests.still_export.fla_models import FlaModel

        return FlaModel(family, drawn, **SIZES, **sizes)

    return make


def _rwkv7() -> Any:
    from tests.still_export.rwkv_models import Rwkv7Model

    ranks = dict.fromkeys(("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"), 16)
    return Rwkv7Model("rwkv7", drawn, **SIZES, **ranks, head_dim=16, value_dim=[64, 64])


def _of_transformers(name: str, **sizes: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**SIZES, max_position_embeddings=1024, **sizes)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _linearized(layer: str, dim: int, theta: float, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        from still_export.mixers.config import StillConfig
        from still_export.models import attach_untrained

        still = {"chunk_size": 32, "layer_types": [layer] * 2, **settings}
        with torch.device("cpu"):  # its random weights are the CPU's, wherever it is trained
            model = _of_transformers(
                "Llama", num_attention_heads=2, num_key_value_heads=1, head_dim=dim, rope_theta=theta
            )()
            return attach_untrained(model, StillConfig.from_dict(still)).float().train()

    return make


RULES: dict[str, Rule] = {
    "hybrid": Rule(
        _linearized("hybrid_attention", 48, 1e6, salient_per_chunk=16),
        False,
        keys=6,
        peak_rate=2e-3,
        phases=((48, 1500), (128, 1500), (TOKENS, 3000)),
    ),
    "allmem": Rule(_linearized("allmem", 32, 1e4), False),
    "gated": Rule(_fla("gla", num_heads=2, num_kv_heads=None, expand_k=1.0, expand_v=1.0, attn=None), False),
    "delta": Rule(_fla("delta_net", num_heads=2, expand_k=1.0, expand_v=1.0), True),
    "gated_delta": Rule(_fla("gated_deltanet", num_heads=2, num_v_heads=2, head_dim=64, expand_v=1.0), True),
    "rwkv7": Rule(_rwkv7, True),
    "mamba2": Rule(
        _of_transformers("Mamba2", num_heads=8, head_dim=16, state_size=32, n_groups=1, expand=2, chunk_size=32), False
    ),
    "conv": Rule(
        _of_transformers(
            "Lfm2",
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
        ),
        False,
    ),
}


def parameters_of(model: Any) -> list[Tensor]:
    """Those that are trained."""
    if isinstance(model, nn.Module):
        return [p for p in model.parameters() if p.requires_grad]
    return [tensor.requires_grad_() for tensor in model.tensors.values()]


def stepper(
    model: Any, optimizer: torch.optim.Optimizer, tokens: int, device: str
) -> Callable[[Tensor, Tensor], Tensor]:
    """One step of training on a batch; on a GPU the thousands of small kernels of a token-by-token recurrence are one CUDA graph."""
    parameters = parameters_of(model)

    def work(ids: Tensor, answers: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        logits = model(ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), answers.flatten(), ignore_index=UNASKED)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.detach()

    if device == "cpu" or isinstance(model, nn.Module):
        return work
    ids, answers = torch.zeros(ROWS, tokens, dtype=torch.long), torch.full((ROWS, tokens), UNASKED)
    answers[:, -1] = VALUE
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            work(ids, answers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = work(ids, answers)

    def replay(new_ids: Tensor, new_answers: Tensor) -> Tensor:
        ids.copy_(new_ids)
        answers.copy_(new_answers)
        graph.replay()
        return loss

    return replay


def wrong_answers(model: Any, rule: Rule, device: str, tokens: int = TOKENS, rows: int = 64) -> tuple[int, int]:
    """Queries behind up to `tokens` tokens that are answered wrongly, and all."""
    ids, answers = texts(rows, tokens, rule.again, np.random.default_rng(10**6), rule.keys)
    ids, answers = ids.to(device), answers.to(device)
    with torch.no_grad():
        said = torch.cat([model(part, use_cache=False).logits.argmax(-1) for part in ids.split(16)])
    asked = answers != UNASKED
    return int(((said != answers) & asked).sum()), int(asked.sum())


def in_float16(model: Any) -> Any:
    """The same model with weights as float16 keeps them."""
    with torch.no_grad():
        for tensor in model.state_dict().values() if isinstance(model, nn.Module) else model.tensors.values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.half().float())
    return model


@contextmanager
def weights_of(parameters: list[Tensor], others: list[Tensor]) -> Iterator[None]:
    """`others` in the place of the parameters."""
    held = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        torch._foreach_copy_(parameters, others)
        yield
        torch._foreach_copy_(parameters, held)


def train(name: str, output: Path, scale: float, device: str, seed: int = 0) -> None:
    """Train the model of a rule, and write its folder if it answers everything."""
    rule, started = RULES[name], time.monotonic()
    torch.manual_seed(seed)
    model = rule.make()
    if isinstance(model, nn.Module):
        model.to(device)
    parameters = parameters_of(model)
    rate = torch.tensor(rule.peak_rate) if device != "cpu" else rule.peak_rate
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, betas=(0.9, 0.98), capturable=device != "cpu")
    generator, done, begun = np.random.default_rng(seed + 1), 0, 0
    mean = [p.detach().clone() for p in parameters]
    every = sum(int(steps * scale) for _, steps in rule.phases)
    print(f"{name}: {sum(p.numel() for p in parameters):,} parameters", flush=True)
    for tokens, steps in rule.phases:
        step = stepper(model, optimizer, tokens, device)
        done, begun = begun, begun + int(steps * scale)
        for number in range(int(steps * scale)):
            now = rule.peak_rate * min(1.0, (done + 1) / 100) * 0.5 * (1 + math.cos(math.pi * done / every)) + 1e-5
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(now)
                else:
                    group["lr"] = now
            loss = step(*(x.to(device) for x in texts(ROWS, tokens, rule.again, generator, rule.keys)))
            done += 1
            torch._foreach_lerp_(mean, [p.detach() for p in parameters], AVERAGED)
            if number % CHECKED == CHECKED - 1:
                with weights_of(parameters, mean):
                    wrong, asked = wrong_answers(model, rule, device, tokens)
                if not wrong:
                    break
            if number % 200 == 0:
                print(f"{name}: {tokens} tokens, step {done} of {every}, loss {float(loss):.4f}", flush=True)
    if isinstance(model, nn.Module):
        model.eval()
    with torch.no_grad():
        torch._foreach_copy_(parameters, mean)
    wrong, asked = wrong_answers(in_float16(model), rule, device)
    print(f"{name}: {wrong} of {asked} answers wrong, {time.monotonic() - started:.0f} s on {device}", flush=True)
    if wrong:
        raise SystemExit(f"{name}: not learned; nothing written")
    folder = output / name
    if isinstance(model, nn.Module):
        model.cpu().half().save_pretrained(folder)
    else:
        model.tensors = {n: x.detach().cpu().half() for n, x in model.tensors.items()}
        model.config["torch_dtype"] = "float16"
        model.save_pretrained(folder)


def main() -> None:
    """As the head of the file says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(RULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    for name in options.only:
        train(name, options.output, options.scale, device, options.seed)


if __name__ == "__main__":
    main()
