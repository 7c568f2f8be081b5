"""A package in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from still_export.loading.language_model import LanguageModel


def load(
    package: str | Path,
    *,
    runtime: str | None = None,
    provider: Literal["cpu", "cuda"] = "cpu",
    threads: int = 0,
    plugin: Path | None = None,
    trust_native: bool = False,
    check: bool = True,
    adapter: str | Path | None = None,
    prefix_cache: str | int = 0,
    prefix_dir: str | Path | None = None,
    guess: str | Path | None = None,
) -> LanguageModel:
    """The model of an exported package, ready to answer.

        model = still_export.load("package")
        print(model.generate("Once upon a time", max_tokens=64).text)
        for piece in model.generate([{"role": "user", "content": "Hello!"}], stream=True):
            print(piece, end="", flush=True)

    Args:
        package: Its folder.
        runtime: None = the package's own; "torch" is the PyTorch model that it was exported from.
        provider: ONNX Runtime's provider.
        threads: 0 = the runtime's choice.
        plugin: TensorRT plugin library to use instead of the package's.
        trust_native: Load native code of the package that this machine did not build, and remember it.
        check: Compare the weights with their hashes while they are loaded.
        adapter: Folder of a LoRA adapter to add, if the package was exported with --adapters; `use_adapter` exchanges it.
        prefix_cache: Bytes, or "2GiB", for states of prompts and answers, so that a call reads only the new part of its prompt.
        prefix_dir: Folder in which these states outlive the process.
        guess: Source of guessed tokens, if the package was exported with --speculate: "mtp", the model's own MTP head, "lookup" in the
            prompt and the answer so far, "none", or the folder of a draft model's package; None = mtp if there is a head, else lookup.

    Raises:
        ConfigError: The package does not fit the runtime, provider or adapter, or the cache's size is no size.
        RunError: The package does not run here, it has no head or accepts no guesses, or the draft has another tokenizer.
    """
    from still_export.loading.runtimes import open_runner, runtime_of
    from still_export.package.folder import open_package
    from still_export.package.trust import trust_package
    from still_export.runtime.draft import demand_guesses, open_draft
    from still_export.runtime.head import demand_head
    from still_export.runtime.prefix_folder import open_prefixes
    from still_export.runtime.speculation import Speculation
    from still_export.runtime.text import TextAhead

    folder = Path(package)
    manifest = open_package(folder, check_hashes=False).manifest  # the runner compares them
    if trust_native:
        trust_package(folder)
    chosen = runtime_of(manifest["target"], runtime).name
    text = TextAhead(folder, manifest)
    runner = open_runner(folder, manifest, chosen, provider, threads=threads, plugin=plugin, check=check)
    if guess == "none":
        runner.speculation = None
    elif guess == "lookup":
        demand_guesses(runner)
        runner.speculation = Speculation(runner.guesses)
    elif guess == "mtp":
        demand_head(runner)
    elif guess is not None:
        runner.speculation = open_draft(runner, load(guess, threads=threads, check=check, guess="none").runner)
    model = LanguageModel(runner, text=text)
    if adapter is not None:
        model.use_adapter(adapter)
    cache = open_prefixes(
        runner, prefix_cache, Path(prefix_dir) if prefix_dir else None
    )  # of the model with its adapter
    return LanguageModel(runner, cache, text) if cache else model
