"""All else that a user runs of a package: tokenizer, chat format, end tokens and generation settings, held to the model's own; and the
programs that were copied into it, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from still_export.errors import StillExportError
from still_export.package.files import MODEL
from still_export.package.folder import Package
from still_export.proof.reference import open_runner
from still_export.proof.texts_asked import CHATS, PROSE, Silent, asked_texts
from still_export.proof.verdict import Check, Verdict
from still_export.runtime.bundle import PROGRAMS, RUNTIME
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.text import Answer, Text

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
SPECIAL_MOST = 64
"""Special tokens whose texts are asked in every place; of all others, their ids."""
CONTROL = (3, 4)
"""Types of a GGUF file's tokens that may end an answer beside the one that it names: of control, and those that its maker added."""
TOKENS = 12
"""That a program generates."""
TIMEOUT_S = 600
SHOWN = 60
"""Characters of a text that a message shows."""
APART = ("transformers_version", "_from_model_config")
"""Entries of a generation configuration that set nothing."""
ALONE = """
import importlib, pathlib, runpy, sys
_, folder, program, *words = sys.argv
sys.path.insert(0, folder)
for path in sorted(pathlib.Path(folder, "{runtime}").rglob("*.py")):
    name = ".".join(path.relative_to(folder).with_suffix("").parts)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("{runtime}"):
            sys.exit(f"{{name}}: {{error}}")
    except BaseException as error:
        sys.exit(f"{{name}}: {{type(error).__name__}}: {{error}}")
sys.argv = [program, *words]
runpy.run_path(program, run_name="__main__")
"""
"""Imports every module of the copied runner, as far as other libraries are here, then runs a program of the package."""


def check_files(package: Package, source: Path) -> Verdict:
    """Hold tokenizer, chat format, end tokens and generation settings to those of the model folder or GGUF file `source`."""
    verdict = Verdict()
    if TOKENIZER in package.manifest["files"]:
        verdict.add(_check_texts(package, source))
    else:
        verdict.not_asked.append(f"texts: the package has no {TOKENIZER} and runs on token ids")
    verdict.add(_check_ends(package, source))
    return verdict


def _check_texts(package: Package, source: Path) -> Verdict:
    from tokenizers import Tokenizer

    verdict = Verdict()
    path = package.path / TOKENIZER
    try:
        held = Tokenizer.from_file(str(path))
    except Exception as error:  # of the library's Rust side
        return Verdict.of([Check("the tokenizer is the model's", False, f"it cannot be read: {error}", TOKENIZER)])
    own = _own_tokenizer(source, verdict)
    if own is None:
        return verdict
    added = sorted(own.get_added_vocab().items(), key=lambda entry: entry[1])
    texts = asked_texts([token for token, _ in added[:SPECIAL_MOST]])
    wrong = []
    for text in texts:
        for special in (False, True):
            right = list(own(text, add_special_tokens=special)["input_ids"])
            found = held.encode(text, add_special_tokens=special).ids
            if right != found:
                wrong.append(_first_difference(text, right, found))
        back = own.decode(right, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if right == found and held.decode(found) != back:
            wrong.append(
                f"the tokens of {text[:SHOWN]!r} become {held.decode(found)[:SHOWN]!r}, the model's {back[:SHOWN]!r}"
            )
    wrong += [
        f"token {token!r} has the id {held.token_to_id(token)}, the model's {number}"
        for token, number in added
        if held.token_to_id(token) != number
    ]
    vocabulary = own.get_vocab()
    if held.get_vocab() != vocabulary:
        other = {token for token, number in held.get_vocab().items() if vocabulary.get(token) != number}
        other |= {token for token in vocabulary if token not in held.get_vocab()}
        wrong.append(f"{len(other)} words have other ids, such as {min(other)!r}")
    what = "" if not wrong else wrong[0] + ("" if len(wrong) == 1 else f"; {len(wrong)} texts and words differ")
    name = f"the tokenizer reads and writes {len(texts)} texts as the model's"
    verdict.checks.append(Check(name, not wrong, what, TOKENIZER * bool(wrong), notes=tuple(wrong[1:5])))
    if source.is_dir():
        verdict.add(_check_chat(package, held, own))
    return verdict


def _own_tokenizer(source: Path, verdict: Verdict) -> Any:
    """The model's tokenizer by transformers, of a GGUF file as this project reads it: transformers leaves out its splitting rule."""
    if source.is_file():
        from still_export.models.load import load_tokenizer

        verdict.add(_check_gguf_words(source))
        verdict.not_asked.append(
            "how texts are split, by another reader: transformers drops the rule of tokenizer.ggml.pre, so this project's own was asked"
        )
        return load_tokenizer(str(source))
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of half a dozen libraries
        reason = " ".join(str(error).split())[:200]
        verdict.not_asked.append(f"texts: transformers cannot read the model's tokenizer ({reason})")
        return None


def _check_gguf_words(source: Path) -> Verdict:
    """The words of a GGUF file by their ids, read with the gguf package; those that it calls unused may be missing."""
    from gguf import GGUFReader, TokenType

    from still_export.models.load import load_tokenizer

    reader = GGUFReader(source)
    field, kinds = (reader.get_field(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if field is None:
        return Verdict(not_asked=["the words of the GGUF file: it has none"])
    words, known = field.contents(), load_tokenizer(str(source)).convert_ids_to_tokens
    unused = {i for i, kind in enumerate(kinds.contents() if kinds else ()) if kind == TokenType.UNUSED}
    wrong = [
        f"token {number} is {found!r}, the file's {word!r}"
        for number, (word, found) in enumerate(zip(words, known(list(range(len(words)))), strict=True))
        if word != found and not (found or "").startswith("<0x") and (found is not None or number not in unused)
    ]
    return Verdict.of(
        [Check("the tokenizer's words are the file's", not wrong, wrong[0] if wrong else "", notes=tuple(wrong[1:5]))]
    )


def _first_difference(text: str, right: Sequence[int], found: Sequence[int]) -> str:
    place = next(
        (i for i, pair in enumerate(zip(right, found, strict=False)) if pair[0] != pair[1]), min(len(right), len(found))
    )
    ours, theirs = (list(ids[place : place + 4]) for ids in (found, right))
    return f"{text[:SHOWN]!r} becomes {len(found)} tokens, the model's {len(right)}; from number {place} on {ours}, the model's {theirs}"


def _check_chat(package: Package, held: Any, own: Any) -> Verdict:
    """The chats of the package beside those of the model's template: texts and tokens."""
    name = "the chat format is the model's"
    template, chat = bool(getattr(own, "chat_template", None)), package.manifest.get("chat")
    if not template or not chat:
        wrong = ["the model has none"] * (not template and bool(chat)) + ["the model has one"] * (template and not chat)
        return Verdict.of([Check(name, False, wrong[0], "manifest.json: chat")] if wrong else [])
    text, wrong, asked = Text(Silent(package.path, package.manifest)), list[str](), 0  # type: ignore[arg-type]
    for messages, more in CHATS:
        try:
            right = own.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **more)
        except Exception as error:  # of a template, which may raise anything
            right = None
            reason = str(error)
        try:
            found = text.dialogue(messages, **more)
        except RunError as error:
            if right is not None:
                wrong.append(f"{len(messages)} messages are refused ({error})")
            continue
        if right is None:
            wrong.append(f"{len(messages)} messages are taken, which the model's template refuses ({reason})")
            continue
        asked += 1
        if (ids := own(right, add_special_tokens=False)["input_ids"]) != found:
            wrong.append(_first_difference(f"{len(messages)} messages", ids, found))
    if not asked and not wrong:
        return Verdict(not_asked=["chats: the model's template takes none of those that are asked"])
    return Verdict.of(
        [Check(name, not wrong, wrong[0] if wrong else "", "manifest.json: chat" * bool(wrong), notes=tuple(wrong[1:]))]
    )


def _check_ends(package: Package, source: Path) -> Verdict:
    """End tokens and generation settings."""
    verdict, known = Verdict(), set(package.manifest["eos_token_ids"])
    if source.is_file():
        from gguf import GGUFReader

        reader = GGUFReader(source)
        ends = [reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        right, more = ({int(f.contents()) for f in part if f is not None} for part in (ends[:1], ends))
        kinds = reader.get_field("tokenizer.ggml.token_type")
        more |= set() if kinds is None else {i for i, kind in enumerate(kinds.contents()) if kind in CONTROL}
    else:
        said = _json(source / GENERATION)
        right = _ids(said.get("eos_token_id"))
        if not said:
            config = _json(source / "config.json")
            right = _ids({**config.get("text_config", {}), **config}.get("eos_token_id"))
        more = right | _ids(_end_of_tokenizer(source))
        if said:
            verdict.checks.append(_check_settings(package, said))
    passed = right <= known <= more
    verdict.checks.append(
        Check(
            "end tokens are the model's",
            passed,
            "" if passed else f"they are {sorted(known)}, the model's {sorted(right)}",
            "" if passed else "manifest.json: eos_token_ids",
        )
    )
    return verdict


def _end_of_tokenizer(source: Path) -> int | None:
    said = _json(source / "tokenizer_config.json").get("eos_token")
    token = said.get("content") if isinstance(said, Mapping) else said
    words = _json(source / TOKENIZER).get("added_tokens") or []
    return next((int(word["id"]) for word in words if word.get("content") == token), None)


def _check_settings(package: Package, said: Mapping[str, Any]) -> Check:
    """Generation settings that the model has and the package has otherwise."""
    from transformers import GenerationConfig

    right, found = (
        GenerationConfig(**{k: v for k, v in each.items() if k not in APART}).to_dict()
        for each in (said, _json(package.path / GENERATION))
    )
    wrong = [
        f"{name} is {found.get(name)!r}, the model's {right[name]!r}"
        for name in sorted(said)
        if name not in APART and name in right and found.get(name) != right[name]
    ]
    return Check("generation settings are the model's", not wrong, "; ".join(wrong[:4]), GENERATION * bool(wrong))


def _ids(said: Any) -> set[int]:
    return set() if said is None else {int(x) for x in (said if isinstance(said, (list, tuple)) else [said])}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_programs(package: Package, provider: str = "cpu") -> Verdict:
    """Run the programs of a package as a stranger does, and compare their tokens with those of the runner here."""
    manifest, verdict = package.manifest, Verdict()
    program = package.path / PROGRAMS["ort"]
    if not program.is_file() or program.name not in manifest["files"]:
        others = [name for name in PROGRAMS.values() if name in manifest["files"]]
        verdict.not_asked.append(
            f"{', '.join(others)}, run in a process of its own: it needs the GPU that the engine was built for"
            if others
            else "a program of its own: this package has none"
        )
        return verdict
    text = TOKENIZER in manifest["files"] and importlib.util.find_spec("tokenizers") is not None
    prompt = PROSE[:40]
    vocabulary = int(manifest["model"]["vocab_size"])
    ids = [1 + 7 * i % (vocabulary - 1) for i in range(9)] if vocabulary > 1 else [0]
    asked = ["--prompt", prompt] if text else ["--prompt-ids", ",".join(map(str, ids))]
    asked += ["--tokens", str(TOKENS), "--provider", provider]
    command = [sys.executable, "-c", ALONE.format(runtime=RUNTIME), str(package.path), str(program), *asked]
    name = f"every file of {RUNTIME}/ can be imported, and {program.name} says the same, in a process of its own"
    try:
        runner = open_runner(package.path, manifest, "ort", provider, check=False)
        runner.start()
        speaks = Text(runner) if text else None
        answer = Answer(runner, speaks, speaks.encode(prompt) if speaks else ids, TOKENS, Sampling())
        right = "".join(answer)
    except RunError as error:
        return Verdict.of([Check(name, False, f"the runner here: {error}", MODEL)])
    done = _run(command)
    found, wrong = done.stdout.removesuffix("\n"), ""
    if done.returncode:
        wrong = f"it ends with exit code {done.returncode}: {_last_line(done)}"
    elif found != right:
        wrong = f"it says {found[:SHOWN]!r}, the runner here {right[:SHOWN]!r}"
    verdict.checks.append(Check(name, not wrong, wrong, program.name * bool(wrong)))
    return verdict


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """In a process that sees nothing of this project but the package."""
    apart = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    apart |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", env=apart, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"it did not end in {TIMEOUT_S} seconds")
    except OSError as error:
        raise StillExportError(f"{command[0]} cannot be started: {error}.") from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:300] if lines else "it says nothing"
