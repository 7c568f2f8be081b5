"""`still_export.load`: answers, stop texts, chats, and states that are kept, for a package with a tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import still_export
from still_export.cli.chat import interruptible, statistics, talk
from still_export.cli.output import Output
from still_export.errors import ConfigError, StillExportError
from still_export.package.chat_format import ChatFormat
from still_export.runtime.conversation import Conversation, FullError
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.snapshot import Snapshot
from still_export.runtime.stop_texts import StopTexts, until
from still_export.targets.ort.options import OrtOptions
from tests.still_export.verbs import call

pytest.importorskip("onnxruntime")
SMALL = Path(__file__).resolve().parents[2] / "assets/small"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}({{ m.content }})\n{% elif m.role == 'user' %}User:{{ m.content }}\nYou:"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message.') }}{% endif %}" + TEMPLATE
CHAT = {"templates": {"default": TEMPLATE}, "tokens": {}}
TEXT = "The road climbs from the village to the old mill. "


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's package, with a chat format that its own tokenizer has not."""
    folder = tmp_path_factory.mktemp("api") / "package"
    assert call("export", SMALL, "--to", "onnx", "-o", folder, "-q", "--capacity-tokens", "400") == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["chat"] = CHAT
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def model(package: Path) -> still_export.LanguageModel:
    return still_export.load(package, threads=1)


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").restore(None)


def test_the_same_answer_however_it_is_asked(model: still_export.LanguageModel) -> None:
    answer = model.generate(TEXT, max_tokens=24)
    assert answer.ended == "length" and len(answer.tokens) == 24 and answer.prompt_tokens > 5
    assert "".join(model.generate(TEXT, max_tokens=24, stream=True)) == answer.text
    assert model.generate(model.text.encode(TEXT), max_tokens=24).tokens == answer.tokens
    assert model.text.tokenizer.decode(answer.tokens).strip() == answer.text.strip()
    with pytest.raises(RunError, match="max_tokens=0"):
        model.generate(TEXT, max_tokens=0)
    with pytest.raises(ConfigError, match="runs with ort"):
        still_export.load(model.runner.folder, runtime="trt")


def test_threads_wait_for_one_another(model: still_export.LanguageModel) -> None:
    prompts = [f"{TEXT}{number} " for number in range(5)]
    alone = [model.generate(prompt, max_tokens=24).tokens for prompt in prompts]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda prompt: model.generate(prompt, max_tokens=24).tokens, prompts * 2))
    assert together == alone * 2


@pytest.mark.parametrize("begun", [0, 3], ids=["not begun", "begun"])
@pytest.mark.parametrize("other", ["generate", "stream", "read", "restore", "another thread"])
def test_a_stream_ends_where_another_call_uses_the_model(
    model: still_export.LanguageModel, other: str, begun: int
) -> None:
    right = model.generate("Another text.", max_tokens=12)
    stream = iter(model.generate(TEXT, max_tokens=24, stream=True))
    pieces = [next(stream) for _ in range(begun)]
    if other == "generate":
        assert model.generate("Another text.", max_tokens=12).tokens == right.tokens
    elif other == "stream":
        assert "".join(model.generate("Another text.", max_tokens=12, stream=True)) == right.text
    elif other == "read":
        model.read("Another text.")
    elif other == "restore":
        model.restore(None)
    else:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(model.generate, "Another text.", max_tokens=12).result().tokens == right.tokens
    with pytest.raises(RunError, match="another call"):
        pieces += stream
    assert len(pieces) == begun


def test_the_packages_program_answers_as_the_api(
    model: still_export.LanguageModel, package: Path, tmp_path: Path
) -> None:
    message = [{"role": "user", "content": "Where is the mill?"}]
    chat, text = (model.generate(asked, max_tokens=9).text for asked in (message, TEXT))
    snapshot = model.read(TEXT * 3, chat=True)
    snapshot.save(tmp_path / "chat")
    after = model.generate(message, max_tokens=9).text
    model.restore(None)
    model.read(TEXT).save(tmp_path / "text")
    behind = model.generate("It is", max_tokens=9).text
    (tmp_path / "file").write_text("\ufeffWhere is the mill?", encoding="utf-8")

    def said(*words: str | Path, stdin: str = "", code: int = 0) -> str:
        program = [sys.executable, str(package / "run_ort.py"), "--max-new-tokens", "9", *map(str, words)]
        done = subprocess.run(program, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return (done.stderr if code else done.stdout).removesuffix("\n")

    assert said("--prompt", TEXT) == text == said("--prompt-file", "-", stdin=TEXT)
    assert (
        said("--chat", "--prompt", "Where is the mill?") == chat == said("--chat", "--prompt-file", tmp_path / "file")
    )
    assert said("--chat", "--load-state", tmp_path / "chat", "--prompt", "Where is the mill?") == after
    assert said("--load-state", tmp_path / "text", "--prompt", "It is") == behind
    assert "plain text" in said("--chat", "--load-state", tmp_path / "text", "--prompt", "x", code=2)
    assert "--prompt-file" in said(code=2) and "gone" in said("--prompt-file", tmp_path / "gone", code=2)
    assert "no saved state" in said("--load-state", tmp_path / "file", "--prompt", "x", code=2)


def test_stop_texts_end_an_answer(model: still_export.LanguageModel) -> None:
    whole = model.generate(TEXT, max_tokens=40)
    stop = whole.text[12:17]
    answer = model.generate(TEXT, max_tokens=40, stop=["never said", stop])
    assert answer.ended == "stop" and answer.text == whole.text[: whole.text.index(stop)]
    assert len(answer.tokens) < 40
    with pytest.raises(RunError, match="empty"):
        model.generate(TEXT, stop="")


@pytest.mark.parametrize("pieces", [["a", "b", "c", "abd"], ["abcab", "d"], list("abcabd"), ["abcabd"]])
def test_until_holds_back_what_may_be_a_stop(pieces: list[str]) -> None:
    for stops, expected, found in (
        (["abd"], "abc", True),
        (["abdx", "zz"], "abcabd", False),
        (["bd", "ca"], "ab", True),
    ):
        watched = StopTexts(stops)
        assert "".join(until(pieces, watched)) == expected
        assert watched.found == found


def test_streamed_pieces_are_the_text(model: still_export.LanguageModel) -> None:
    """Characters of several bytes, and spaces at the beginning of words, whatever the cuts."""
    for said in ("Grüße, 世界! naïve café — 100 €  two  spaces\n\nnew 🎉🎉 line", " leading", "a" * 300):
        ids = model.text.encode(said)
        pieces = list(model.text.stream(ids))
        assert "".join(pieces) == model.text.tokenizer.decode(ids)
        assert not any(p.endswith("\ufffd") for p in pieces)


def test_a_text_is_read_once_and_asked_often(model: still_export.LanguageModel, tmp_path: Path) -> None:
    document = TEXT * 12
    questions = [" What is old?", " Where does the road begin?"]
    expected = [model.generate([{"role": "user", "content": document + q}], max_tokens=8).tokens for q in questions]
    read = model.read(document, chat=True)
    assert read.place == "user" and read.length == model.runner.length[0]
    for _ in range(2):
        for question, tokens in zip(questions, expected, strict=True):
            # Cut between document and question, tokens may differ from those of the whole; here they do not.
            assert model.generate([{"role": "user", "content": question}], max_tokens=8).tokens == tokens
    read.save(tmp_path / "state.safetensors")
    model.restore(None)
    assert model.generate(TEXT, max_tokens=4).prompt_tokens < 30
    model.restore(tmp_path / "state.safetensors")
    assert model.generate([{"role": "user", "content": questions[0]}], max_tokens=8).tokens == expected[0]
    with pytest.raises(RunError, match=r"restore\(None\)"):
        model.read("again", chat=True)


def test_a_snapshot_holds_what_was_answered(model: still_export.LanguageModel) -> None:
    """Going on from it is going on with the dialogue, also where the answer was cut off."""
    first = model.generate([{"role": "user", "content": "Hello."}], max_tokens=9)
    model.restore(model.snapshot())
    second = model.generate([{"role": "user", "content": "And then?"}], max_tokens=9)
    assert second.ended == "length"
    states = model.snapshot()
    model.restore(None)
    ids = model.text.dialogue([{"role": "user", "content": "Hello."}]) + first.tokens
    ids += model.text.dialogue([{"role": "user", "content": "And then?"}], "answer")
    assert model.generate(ids, max_tokens=9).tokens == second.tokens
    for name, array in model.snapshot().arrays.items():
        np.testing.assert_allclose(states.arrays[name], array, atol=1e-5, rtol=1e-5)


def test_states_that_are_no_states(model: still_export.LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    model.read(TEXT).save(path)
    good = Snapshot.load(path)
    with pytest.raises(RunError, match="cannot be read"):
        Snapshot.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("no state")
    with pytest.raises(RunError, match="no saved state"):
        Snapshot.load(tmp_path / "text")
    save_file(load_file(path), tmp_path / "plain.safetensors")
    with pytest.raises(RunError, match="no saved state"):
        Snapshot.load(tmp_path / "plain.safetensors")
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    for damage in (
        {"dtype": "F8"},
        {"shape": [7]},
        {"data_offsets": [0, 1 << 60]},
        {"data_offsets": [8, 0]},
        {"data_offsets": 5},
    ):
        first = next(name for name in header if name != "__metadata__")
        text = json.dumps({**header, first: {**header[first], **damage}}).encode()
        for content in (
            len(text).to_bytes(8, "little") + text + whole[start:],
            b"\xff" * 7 + b"\0" + text,
            whole[:-1],
            whole[:40],
        ):
            (tmp_path / "damaged").write_bytes(content)
            with pytest.raises(RunError, match=r"no saved state"):
                Snapshot.load(tmp_path / "damaged")
    described = {"length": -1, "package": good.package, "place": "text", "unread": []}
    for change in ({}, {"length": 3, "place": "nowhere"}, {"length": 3, "unread": [1.5]}, {"length": True}):
        metadata = {"format": "still-export state 1", "still_export": json.dumps({**described, **change})}
        save_file(load_file(path), tmp_path / "odd.safetensors", metadata=metadata)
        with pytest.raises(RunError, match="no saved state"):
            Snapshot.load(tmp_path / "odd.safetensors")
    kept = model.runner.manifest
    changed = [
        {"state_identity": "0" * 64},
        {"state_identity": None},
    ]  # another portable package; one of before there was an identity
    for change in changed:
        model.runner.manifest = {**kept, **change}
        try:
            with pytest.raises(RunError, match="another package"):
                model.restore(good)
        finally:
            model.runner.manifest = kept
    arrays = {name: array[..., :-1] for name, array in good.arrays.items()}
    with pytest.raises(RunError, match="expected"):
        model.restore(Snapshot(arrays, good.length, good.package))


def test_messages_that_are_refused(model: still_export.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="no messages"):
        model.text.dialogue([])
    with pytest.raises(RunError, match="message 2 has no role"):
        model.text.dialogue([{"role": "user", "content": "x"}, {"content": "y"}])
    with pytest.raises(RunError, match=r"part 1 of message 1 .*image_url"):
        model.text.dialogue([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    monkeypatch.setattr(model.text, "chat", ChatFormat({"default": NO_SYSTEM}, {}))
    with pytest.raises(RunError, match="refuses these messages: no system message"):
        model.text.dialogue([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    monkeypatch.setattr(model.text, "chat", None)
    with pytest.raises(RunError, match="no chat format"):
        model.text.dialogue([{"role": "user", "content": "y"}])


def test_a_dialogue_is_the_templates_text(model: still_export.LanguageModel) -> None:
    said = [("system", "be kind"), ("user", "Hi."), ("assistant", "Yes."), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in said]
    written = "(be kind)\nUser:Hi.\nYou:Yes.\nUser:Why?\nYou:"
    assert model.text.dialogue(messages) == model.text.encode(written, special=False)
    messages.append({"role": "assistant", "content": "Be"})  # is continued
    assert model.text.dialogue(messages) == model.text.encode(written + "Be", special=False)
    assert model.generate(messages, max_tokens=3).prompt_tokens == len(model.text.encode(written + "Be", special=False))


def conversation(model: still_export.LanguageModel, tokens: int = 20) -> Conversation:
    return Conversation(model.runner, model.text, tokens, Sampling(), "be kind")


def test_a_conversation_is_refused_before_anyone_types(
    model: still_export.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = model.runner.length[0]
    for chat, said in ((None, "no chat format"), (ChatFormat({"default": NO_SYSTEM}, {}), "no system message")):
        monkeypatch.setattr(model.text, "chat", chat)
        with pytest.raises(RunError, match=said):
            conversation(model)
    assert model.runner.length[0] == read


def test_the_oldest_turns_make_room(model: still_export.LanguageModel) -> None:
    talked = conversation(model)
    full = None
    for number in range(30):
        try:
            talked.ask(f"{TEXT * 2} Number {number}?", stream=None)
        except FullError as error:
            full = error
            break
    assert full is not None and full.turns >= 1 and "capacity of 400" in str(full)
    before, length = list(talked.turns), model.runner.length[0]
    with pytest.raises(FullError):  # nothing was read: asking again says the same
        talked.ask("Again?" + TEXT * 2, stream=None)
    assert model.runner.length[0] == length
    talked.drop(full.turns)
    answer = talked.ask("What now?", stream=None)
    assert talked.turns[:-1] == before[full.turns :]
    # As if the kept turns had been all.
    again = conversation(model)
    again.turns = before[full.turns :]
    assert again.ask("What now?", stream=None).tokens == answer.tokens
    turns = list(talked.turns)
    for alone in (talked, conversation(model)):
        with pytest.raises(RunError, match="exceed") as error:  # dropping turns would not help
            alone.ask(TEXT * 60, stream=None)
        assert not isinstance(error.value, FullError)
    assert talked.turns == turns


def test_talking(
    model: still_export.LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, an answer, the end of the capacity with and without a question."""
    lines = iter(
        [
            "/help",
            "",
            "/nothing",
            "Hello there.",
            "/stats",
            "/back",
            "/reset",
            "/stats",
            *[TEXT * 3] * 12,
            "/exit",
            "never read",
        ]
    )
    monkeypatch.setattr(
        "sys.stdin", type("In", (), {"isatty": lambda s: False, "readline": lambda s: next(lines, "") + "\n"})()
    )
    talk(conversation(model), Output(quiet=False), "drop")
    said = capsys.readouterr()
    assert "turns left: 0" in said.err and "Known: /help, /stats, /back" in said.err
    assert "/reset   forget" in said.err and "/nothing is no command" in said.err and "forgotten" in said.err
    assert (
        "tokens read, turns: 1," in said.err and "ended by --tokens" in said.err and "0 of 400 tokens read" in said.err
    )
    assert "oldest turns forgotten: " in said.err and len(said.out.splitlines()) >= 13
    assert next(lines) == "never read"
    for when_full in ("ask", "stop"):  # without a terminal no line answers a question
        lines = iter([TEXT * 3] * 8)
        with pytest.raises(FullError, match="--when-full drop"):
            talk(conversation(model), Output(quiet=True), when_full)


def test_ctrl_c_stops_the_answer(model: still_export.LanguageModel) -> None:
    """Between two tokens, so that the state is that of what was read; the second one is an interrupt."""
    import signal

    talked = conversation(model, tokens=50)
    count = 0

    class Stream:
        def write(self, text: str) -> None:
            nonlocal count
            count += 1
            if count == 3:
                signal.raise_signal(signal.SIGINT)

        def flush(self) -> None: ...

    with interruptible() as stopped:
        answer = talked.ask("Tell me.", Stream(), None, stopped)
    assert answer.ended == "interrupted" and 1 < len(answer.tokens) < 50
    assert "ended by Ctrl-C" in statistics(talked, answer)
    after = talked.ask("Go on.", None)
    fresh = conversation(model, tokens=50)
    ids = fresh._prompt([("Tell me.", {"role": "assistant", "content": answer.text})], "Go on.")
    assert list(model.runner.generate(ids, 50, Sampling(), model.runner.manifest["eos_token_ids"])) == after.tokens
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_run_reads_standard_input_and_keeps_states(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def piped(text: str) -> None:
        monkeypatch.setattr("sys.stdin", type("In", (), {"isatty": lambda s: False, "read": lambda s: text})())

    piped(TEXT)
    assert call("run", package, "--tokens", 6, "-q") == 0
    first = capsys.readouterr().out
    assert call("run", package, "--tokens", 6, "-q", "--prompt", TEXT) == 0
    assert capsys.readouterr().out == first and first.strip()
    (tmp_path / "long.txt").write_text(TEXT * 10)
    state = tmp_path / "state.safetensors"
    assert call("run", package, "--chat", "--prompt-file", tmp_path / "long.txt", "--save-state", state) == 0
    assert "tokens read into" in capsys.readouterr().err
    assert call("run", package, "--chat", "--load-state", state, "--prompt", " Why?", "--tokens", 5, "--json") == 0
    kept = json.loads(capsys.readouterr().out)
    assert call("run", package, "--chat", "--prompt", TEXT * 10 + " Why?", "--tokens", 5, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert kept["tokens"] == whole["tokens"] and kept["prompt_tokens"] < whole["prompt_tokens"] / 3
    assert call("run", package, "--load-state", tmp_path / "long.txt", "--prompt", "x") == 2
    assert "no saved state" in capsys.readouterr().err
    assert call("run", package, "--chat", "--save-state", state) == 2
    assert "give --prompt" in capsys.readouterr().err.replace("\n", " ")
    assert call("run", package, "--prompt", "x", "--stop", "") == 2
    assert "empty" in capsys.readouterr().err


def test_a_package_without_tokenizer_answers_in_ids(
    model: still_export.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(model.runner.manifest["files"])
    del files["tokenizer.json"]
    monkeypatch.setitem(model.runner.manifest, "files", files)
    bare = still_export.LanguageModel(model.runner)
    with pytest.raises(RunError, match="no tokenizer"):
        bare.generate("text")
    assert bare.generate([5, 6, 7], max_tokens=3).text.split() == [
        str(t) for t in bare.generate([5, 6, 7], max_tokens=3).tokens
    ]


def test_verbs_are_functions_of_their_flags(tmp_path: Path) -> None:
    package = still_export.export(SMALL, tmp_path / "package", dtype="float32", capacity_tokens=300, native=False)
    assert package.manifest["capacity"]["capacity_tokens"] == 300
    assert still_export.verify(package.path, quick=True).passed
    lowered = still_export.lower(package.path, "web", tmp_path / "web")
    assert lowered.manifest["target"] == "web"
    (measured,) = still_export.bench(package.path, lengths=(40,), steps=2)
    assert measured.length == 40


def test_a_record_is_asked_as_its_flags_are(tmp_path: Path) -> None:
    record = still_export.ExportOptions(str(SMALL), dtype="float32", still={"capacity_tokens": 300})
    package = still_export.export(record, tmp_path / "package", options=OrtOptions(native=False))
    assert package.manifest["capacity"]["capacity_tokens"] == 300 and "native" not in package.manifest
    with pytest.raises(ConfigError, match="the option dtype"):
        still_export.export(record, tmp_path / "other", dtype="float16")


@pytest.mark.slow
def test_low_bit_weights_that_a_target_lacks_are_quantized_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """web computes in float32, and its linear layers are the runtime's."""
    half = still_export.export(SMALL, tmp_path / "half", dtype="float16", quantize="int4", capacity_tokens=300)
    lowered = still_export.lower(half.path, "web", tmp_path / "web").manifest
    assert (lowered["target"], lowered["model"]["dtype"]) == ("web", "float32") and str(SMALL) in caplog.text
    assert lowered["quantization"]["roles"].keys() == half.manifest["quantization"]["roles"].keys()
    assert lowered["capacity"]["capacity_tokens"] == 300
    with pytest.raises(StillExportError):
        still_export.lower(half.path, "web", tmp_path / "other", dtype="bfloat16")


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: still_export.export(SMALL, folder / "x", quantise="int4"),
        lambda folder: still_export.export(SMALL, folder / "x", strip_weights=True),  # of engines
        lambda folder: still_export.lower(folder, "web", folder / "x", quantize="int4"),
        lambda folder: still_export.verify(folder, length=(1,)),
        lambda folder: still_export.bench(folder, tokens=3),
    ],
)
def test_an_option_that_there_is_not_is_refused(call: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        call(tmp_path)
    assert not list(tmp_path.iterdir())
