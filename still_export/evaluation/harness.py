"""Packages and PyTorch models for lm-evaluation-harness 0.4.

    python -m still_export.evaluation.harness run --model still-export --model_args package=DIR --tasks TASK
    python -m still_export.evaluation.harness run --model still-export-torch --model_args model=BASE.gguf,adapter=DIR --tasks TASK

is its command line with these models registered.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from still_export.evaluation.bench import BenchOptions
from still_export.evaluation.evaluate import load_any, pick_device
from still_export.evaluation.packages import open_model
from still_export.loading.language_model import LanguageModel
from still_export.models.load import load_tokenizer
from still_export.package.folder import open_package

Answer = tuple[float, bool]
"""Log-probability of a continuation, and whether it is the greedy one."""


@register_model("still-export")
class PackageLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A package in the runner of `still-export run`, one row at a time.

    Args:
        package: Its folder. runtime, provider, threads: See `still-export run`.
        max_tokens: Window of `loglikelihood_rolling`, and length of answers to tasks that set none.
        extra: Ignored: device and batch size, which the command line always passes and a package fixes.
    """

    def __init__(
        self,
        package: str,
        runtime: str | None = None,
        provider: str = "cpu",
        threads: int = 0,
        max_tokens: int = 1024,
        **extra: Any,
    ) -> None:
        super().__init__()
        opened = open_package(Path(package), check_hashes=False)  # the runner checks them
        setting = BenchOptions(threads=int(threads), runtime=runtime, provider=provider)
        self.model = LanguageModel(open_model(opened, setting).runner)
        self.tokenizer = load_tokenizer(Path(package))
        self.max_tokens = int(max_tokens)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = True if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        written: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return written

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[Answer]:
        found: list[Answer] = []
        for context, group in groupby(requests, key=lambda request: request[1]):
            found += self._continuations(context, [continuation for _, _, continuation in group])
        return found

    def _continuations(self, context: list[int], continuations: list[list[int]]) -> list[Answer]:
        """Log-probability of each continuation after the context, which is read once."""
        runner = self.model.runner
        runner.start(1, len(context) + max(map(len, continuations)))
        first = runner.prefill(context)
        length = runner.length.copy()
        again = runner.state_arrays() if len(continuations) > 1 else {}
        found = []
        for number, tokens in enumerate(continuations):
            if number and len(tokens) > 1:
                runner.load(again, length, len(tokens))
            total, greedy, logits = 0.0, True, first
            for place, token in enumerate(tokens):
                scores = logits.astype(np.float64)
                total += float(scores[token] - np.logaddexp.reduce(scores))
                greedy &= int(scores.argmax()) == token
                if place + 1 < len(tokens):
                    logits = runner.step(np.array([token]))[0]
            found.append((total, greedy))
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_tokens, context_len=1
            )
            pairs = [make_disjoint_window(window) for window in windows]
            found.append(sum(self._continuations(context, [tokens])[0][0] for context, tokens in pairs))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        found = []
        for prompt, options in (request.args for request in requests):
            stop = options.get("until") or []
            sampled = options.get("do_sample", False)
            answer = self.model.generate(
                prompt,
                max_tokens=int(options.get("max_gen_toks", self.max_tokens)),
                temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
                stop=[stop] if isinstance(stop, str) else stop,
            )
            found.append(answer.text)
        return found


@register_model("still-export-torch")
class TorchLM(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """A PyTorch model, in batches, as lm-evaluation-harness runs transformers models.

    Args:
        model: Folder, hub id or GGUF file; a softmax model is not changed.
        adapter: Folder that `linearize` trained from it.
        extra: Further arguments of the command line, such as device and batch size.
    """

    def __init__(
        self, model: str, adapter: str | None = None, dtype: str = "auto", tokens: int = 4096, **extra: Any
    ) -> None:
        overlays = () if adapter is None else (adapter,)
        (found,) = load_any(model, None, dtype, generates=True, tokens=int(tokens), overlays=overlays).values()
        device = pick_device(
            str(extra.pop("device", None) or "auto").partition(":")[0]
        )  # the command line says "cuda:0"
        super().__init__(found.to(device), tokenizer=load_tokenizer(model), max_length=int(tokens), **extra)


if __name__ == "__main__":
    cli_evaluate()
