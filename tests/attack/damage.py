"""Damaged packages, models, adapters and tokenizers, over every verb and run_ort.py: how many end in one line, and how many do not."""

import copy
import hashlib
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import forks

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 1 << 31, -(1 << 31), 1 << 32, (1 << 63) - 1, 1 << 63, 10**30, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "-1", "float32", "../../etc/passwd", "/etc/passwd", "\ud7ff\0", "a" * 10_000, [], [0], ["x"], [[]], {},
    {"x": 1}, [None] * 3, {"": {}}, list(range(300)),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every member of a JSON value; of long lists and tables some."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for i, (key, each) in enumerate(inner):
        if i < 40:
            found += places(each, (*path, key))
    return found


def change_json(text: str, rng: random.Random) -> bytes:
    """The text with one or two members replaced, deleted, renamed or doubled."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2))):
        *path, last = rng.choice(places(value))
        table: Any = value
        for key in path:
            table = table[key]
        what = rng.randrange(6)
        if what == 0:
            del table[last]
        elif what == 1 and isinstance(table, dict):
            table[rng.choice(("x", "", str(last).upper()))] = table.pop(last)
        elif what == 2 and isinstance(table, list):
            table.insert(last, copy.deepcopy(table[last]))
        elif what == 3 and isinstance(table[last], (int, float)) and not isinstance(table[last], bool):
            table[last] = table[last] * rng.choice((2, -1, 1000, 0)) + rng.choice((0, 1))
        else:
            table[last] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode("utf-8", "surrogatepass")


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a part flipped, cut, doubled, emptied, or with something else in its place."""
    what, at = rng.randrange(8), rng.randrange(len(data) + 1)
    if what == 0:
        return data[:at]
    if what == 1:
        return b""
    if what == 2:
        return data[:at] + data[rng.randrange(len(data) + 1) :]
    if what == 3:
        return rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]", b'"x"', b"\xff\xfe\0", b"NaN", b"{}"))
    changed = bytearray(data)
    for _ in range(rng.choice((1, 4, 64))):
        if changed:
            # Headers matter most, and they are at the beginning.
            place = rng.randrange(min(len(changed), 64 if what == 4 else 4096 if what == 5 else len(changed)))
            changed[place] = rng.randrange(256)
    return bytes(changed)


def damage(path: Path, rng: random.Random) -> str:
    """Damage one file; what was done."""
    what = rng.randrange(20)
    if what == 0:
        path.unlink()
        return "deleted"
    if what == 1:
        path.unlink()
        path.mkdir()
        return "a folder"
    if what == 2:
        path.unlink()
        path.symlink_to("/etc/passwd")
        return "a link"
    data = path.read_bytes()
    if path.suffix == ".json" and rng.randrange(4):
        path.write_bytes(change_json(data.decode("utf-8"), rng))
        return "members"
    path.write_bytes(change_bytes(data, rng))
    return "bytes"


def rehash(folder: Path) -> None:
    """Make the manifest vouch for what lies there now, as a stranger would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        file = folder / name
        if file.is_file():
            entry.update(sha256=hashlib.sha256(file.read_bytes()).hexdigest(), size_bytes=file.stat().st_size)
    path.write_text(json.dumps(manifest))


class Inputs:
    """What is damaged, made once in `folder` by the command line that is attacked."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model, self.package = folder / "model", folder / "package"
        self.base, self.linearized = folder / "base", folder / "linearized"
        if (folder / "made").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(model, self.model)
        text = folder / "text.txt"
        text.write_text(" ".join(f"The {n}th boat left the harbour with {n * 7} barrels of oil." for n in range(3000)))
        self._make_base()
        self._must(["export", str(self.model), "--to", "onnx", "-o", str(self.package), "-q"])
        steps = ["--recipe", "paper", "--transfer-steps", "2", "--finetune-steps", "2", "--sequence-length", "160"]
        steps += ["--batch-size", "1", "--everyday-questions", "2"]
        self._must(["linearize", str(self.base), "--text", str(text), "-o", str(self.linearized), "-q", *steps])
        (folder / "made").touch()

    def _make_base(self) -> None:
        """A tiny softmax model with the tokenizer of the other one."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(self.base)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.model / name, self.base / name)

    def refused_anyway(self, arguments: list[str], work: Path, ended: forks.Ended) -> bool:
        """Whether the undamaged input is refused with the same words: `build` of a package for onnx, say."""
        good = {"package": self.package, "model": self.model, "adapter": self.linearized / "adapter"}

        def undamaged(text: str) -> str:
            for name, folder in good.items():
                text = text.replace(str(work / name), str(folder))
            return text

        same = forks.run([undamaged(argument) for argument in arguments])
        shutil.rmtree(work / "out", ignore_errors=True)
        return same.kind == "refused" and same.said == undamaged(ended.said)

    def _must(self, arguments: list[str]) -> None:
        ended = forks.run(arguments, 600)
        if ended.code != 0:
            raise SystemExit(f"{' '.join(arguments)}: {ended.code}\n{ended.stderr}")


def case(inputs: Inputs, work: Path, rng: random.Random) -> tuple[str, str, list[str]]:
    """One damaged input in `work`: what it is, the file's name, and the command that gets it."""
    kind = rng.choices(("package", "model", "adapter"), (6, 3, 2))[0]
    out = str(work / "out")
    if kind == "package":
        folder = Path(shutil.copytree(inputs.package, work / "package"))
        names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.suffix != ".py")
        name = rng.choice(["manifest.json"] * 6 + names)
        done = damage(folder / name, rng)
        if name != "manifest.json" and rng.randrange(2) and (folder / name).exists():
            rehash(folder)
            done += ", rehashed"
        ids = ["--prompt-ids", "5,6,7,8", "--tokens", "3", "--threads", "1"]
        text = ["--prompt", "The boat", "--tokens", "3", "--threads", "1"]
        commands = [
            ["run", str(folder), *ids], ["run", str(folder), *text], ["run", str(folder), "--chat", *text], ["inspect", str(folder)],
            ["run_ort.py", "--folder", str(folder), *ids], ["run_ort.py", "--folder", str(folder), *text],
            ["run_ort.py", "--folder", str(folder), "--no-check", *ids],
            ["verify", str(folder), "--lengths", "1,9", "--decode-steps", "2", "-q"], ["build", str(folder), "-q"],
            ["bench", str(folder), "--lengths", "8", "--steps", "2", "-q"],
            ["export", "--config", str(folder / "manifest.json"), "-o", out, "-q"],
        ]  # fmt: skip
        weights = (4, 3, 1, 3, 4, 2, 1, 2, 2, 1, 2)
        return f"{name} ({done})", name, rng.choices(commands, weights)[0]
    if kind == "model":
        folder = Path(shutil.copytree(inputs.model, work / "model"))
        names = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".json", ".safetensors") and "linearize" not in p.name
        )
        name = rng.choice(["config.json"] * 4 + ["tokenizer.json"] * 2 + names)
        done = damage(folder / name, rng)
        commands = [
            ["export", str(folder), "--to", "onnx", "-o", out, "-q"],
            ["evaluate", str(folder), "--tasks", "", "--lengths", "", "--contexts", "64", "--text", str(inputs.folder / "text.txt"),
             "--text-tokens", "128", "--device", "cpu", "-o", out, "-q"],
        ]  # fmt: skip
        return f"model/{name} ({done})", name, rng.choices(commands, (3, 2))[0]
    folder = Path(shutil.copytree(inputs.linearized / "adapter", work / "adapter"))
    name = rng.choice(["adapter_config.json"] * 2 + ["adapter_model.safetensors"])
    done = damage(folder / name, rng)
    commands = [
        ["linearize", str(inputs.base), "--adapter", str(folder), "-o", out, "-q"],
        ["export", str(inputs.base), "--overlay", str(folder), "--to", "onnx", "-o", out, "-q"],
    ]
    return f"adapter/{name} ({done})", name, rng.choice(commands)


def attack(folder: Path, model: Path, seed: int, first: int, count: int, log: Path | None) -> Counter[str]:
    """Run `count` cases from number `first` on; print those that do not end well."""
    os.environ["XDG_CONFIG_HOME"] = str(folder / "configuration")
    forks.preload()
    inputs = Inputs(folder, model)
    found: Counter[str] = Counter()
    verbs: Counter[str] = Counter()
    unnamed = 0
    lines = log.open("w") if log else None
    for number in range(first, first + count):
        rng = random.Random(f"{seed} {number}")
        work = folder / "case"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        what, name, arguments = case(inputs, work, rng)
        ended = forks.run(arguments)
        found[ended.kind] += 1
        verbs[arguments[0]] += 1
        if ended.kind == "refused" and name not in ended.said and not inputs.refused_anyway(arguments, work, ended):
            unnamed += 1
            print(f"{number}: does not name the file: {what}, {arguments[0]}: {ended.said[:300]}", flush=True)
        if lines:
            row = [number, ended.kind, what, arguments[0], ended.code, round(ended.seconds, 2), ended.said[:300]]
            lines.write(json.dumps(row) + "\n")
            lines.flush()
        if ended.kind not in ("refused", "answered"):
            print(
                f"{number}: {ended.kind} ({ended.code}): {what}, {' '.join(arguments[:1])}: {ended.said[-200:]}",
                flush=True,
            )
    shutil.rmtree(folder / "case", ignore_errors=True)
    unnamed_ones = {"without the file's name": unnamed}
    print(json.dumps({"seed": seed, "first": first, "count": count, **dict(found.most_common()), **unnamed_ones}))
    print(json.dumps({"verbs": dict(verbs.most_common())}))
    return found
