"""One object for a package on every runtime: text and chats in, answers out, saved states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from still_export.package.chat_format import Message
from still_export.runtime.base import Runner
from still_export.runtime.decoding import Progress
from still_export.runtime.prefixes import PrefixCache, Reader
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.snapshot import Snapshot
from still_export.runtime.text import Answer, Text, TextAhead

Prompt = str | Sequence[int] | Sequence[Message]
"""A text to continue, token ids, or the messages of a chat; if the last is the assistant's, it is continued."""
Tools = Sequence[Mapping[str, Any]] | None
Arguments = Mapping[str, Any] | None


class LanguageModel:
    """A package's model. One call at a time: its state is updated in place.

    Every call starts from the prefix: nothing at first, what `read` has read, or what `restore` was given.

        model.read(document, chat=True)                      # once; seconds for a long one
        model.snapshot().save("document.safetensors")
        model.generate([{"role": "user", "content": " When was it signed?"}])      # as often as you like

    Args:
        runner: Of any runtime.
        prefixes: Keeps the states of prompts and answers, so that a call reads what is new in its prompt alone; None: all of it.
        text: Being read; None: it is read when it is needed.
    """

    def __init__(self, runner: Runner, prefixes: PrefixCache | None = None, text: TextAhead | None = None) -> None:
        self.runner, self.prefixes, self._ahead = runner, prefixes, text
        self._last: Answer | None = None
        self._text: Text | None = None
        runner.start()
        self._begin_with(None)

    def use_adapter(self, adapter: str | Path | None) -> None:
        """Add a LoRA adapter to the package's weights in the place of the one before, or (None) none; what was read is forgotten.

        Args:
            adapter: PEFT's folder.

        Raises:
            ConfigError: The package was exported without --adapters, or has no place for what is adapted.
            CheckpointError: The adapter is damaged, or of another model.
            RunError: The runtime takes none.
        """
        if adapter is None:
            self.runner.use_adapter({}, "")
        else:
            from still_export.models.read.adapters import adapter_digest, adapter_inputs

            inputs = adapter_inputs(Path(adapter), self.runner.manifest)
            self.runner.use_adapter(inputs, adapter_digest(inputs))
        if self.prefixes is not None:  # its states, and its folder, are of the old weights
            self.prefixes.close()
            self.prefixes.clear()
            self.prefixes.folder = None
        self.restore(None)

    @property
    def text(self) -> Text:
        """Tokenizer and chat format; RunError where the package has none."""
        if self._text is None:
            self._text = self._ahead.get() if self._ahead else Text(self.runner)
        return self._text

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        tools: Tools = None,
        chat_template_kwargs: Arguments = None,
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        tools: Tools = None,
        chat_template_kwargs: Arguments = None,
    ) -> Iterator[str]: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        tools: Tools = None,
        chat_template_kwargs: Arguments = None,
    ) -> Answer | Iterator[str]:
        """The continuation of `prompt` behind the prefix.

        Args:
            prompt: A text, token ids, or messages of a chat: "role" and "content" (a text or text parts), "tool_calls",
                "reasoning_content". After a prefix that ends inside a user's message (`read(chat=True)`) the first message goes on with
                it.
            stream: Pieces of text as they come, rather than the whole answer. Other calls wait until they were all taken.
            max_tokens: At most.
            stop: Texts that end the answer, and are not part of it.
            temperature: 0 = greedy.
            top_k: 0 = all.
            top_p: 1 = all.
            seed: Of the sampling.
            tools: Of a chat: JSON schemas of functions, as OpenAI's API has them.
            chat_template_kwargs: Of a chat: arguments of the model's template, such as `enable_thinking`.

        Raises:
            RunError: It does not fit into the package's capacity, or the chat template refuses it; nothing was read then.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        as_text = "tokenizer.json" in self.runner.manifest["files"]
        answer = self.answer(
            prompt, max_tokens, sampling, stops, as_text=as_text, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        if stream:
            return iter(answer)
        for _ in answer:
            pass
        return answer

    def answer(
        self,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        *,
        as_text: bool = True,
        progress: Progress | None = None,
        stopped: Callable[[], bool] = lambda: False,
        tools: Tools = None,
        chat_template_kwargs: Arguments = None,
    ) -> Answer:
        """An answer that is made while it is iterated; `generate` with more control.

        Args:
            as_text: False: pieces are token ids.
            progress: Called with the pieces of the prompt that were read.
            stopped: Asked before every token whether the answer shall end here.
            tools: See `generate`; chat_template_kwargs too.
        """
        if max_tokens < 1:
            raise RunError(f"max_tokens={max_tokens}; it must be at least 1.")
        known, told = self._begin(self._ids(prompt, tools, chat_template_kwargs), progress)
        self._place = "answer" if _is_chat(prompt) else "text"
        self._last = Answer(
            self.runner,
            self.text if as_text else None,
            self._said[known:],
            max_tokens,
            sampling,
            stop=stop,
            progress=told,
            stopped=stopped,
            cached=known,
            before=self._said[:known],
        )
        return self._last

    def read(
        self,
        prompt: str | Sequence[int],
        *,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Arguments = None,
        progress: Progress | None = None,
    ) -> Snapshot:
        """Read a text behind the prefix, and make the whole the prefix of what follows.

        Args:
            prompt: A text or token ids.
            chat: The text begins a user's message, which the first message of a later call goes on with.
            system: System message of that chat.
            chat_template_kwargs: Arguments of the model's template.
            progress: Called with the pieces that were read.

        Raises:
            RunError: It does not fit, the package has no chat format, or the model asks for whole prompts.
        """
        if chat and self._prefix is not None:
            raise RunError("a chat begins with its first text: restore(None) first.")
        ids = self.text.opening(str(prompt), system, chat_template_kwargs) if chat else self._ids(prompt)
        known, told = self._begin(ids, progress)
        if self._said:
            self.runner.prefill(self._said[known:], told)
        self._place = "user" if chat else "text"
        found = self.snapshot()
        self._begin_with(found)
        return found

    def snapshot(self) -> Snapshot:
        """The state after the last call; `Snapshot.save` writes it."""
        said = self._said + (self._last.tokens if self._last else [])
        given = self.runner.feeding.given
        read = given(int(self.runner.length[0])) - (given(self._prefix.length) if self._prefix else 0)
        return Snapshot.of(self.runner, self._place, tuple(said[read:]))

    def restore(self, snapshot: Snapshot | str | Path | None) -> None:
        """Start the following calls from a snapshot, a file of one, or (None) from nothing.

        Raises:
            RunError: It is of another package, or no snapshot.
        """
        if isinstance(snapshot, str | Path):
            snapshot = Snapshot.load(snapshot)
        self._settle()
        if snapshot is not None:
            snapshot.restore(self.runner)  # errors are raised here
        self._begin_with(snapshot)

    def _begin_with(self, prefix: Snapshot | None) -> None:
        self._prefix, self._place = prefix, prefix.place if prefix else "text"
        self._said = list(prefix.unread) if prefix else []
        self._reader = Reader(self.runner, self.prefixes, prefix)

    def _settle(self) -> None:
        """Cache the state after the last call, if that is complete."""
        if self._last is not None and self._last.whole:
            self._reader.end(self._said + self._last.tokens)
        self._last = None

    def _ids(self, prompt: Prompt, tools: Tools = None, arguments: Arguments = None) -> list[int]:
        """Token ids of a prompt after the prefix."""
        place = "text" if self._prefix is None else self._prefix.place
        if isinstance(prompt, str):
            return self.text.encode(prompt, special=self._prefix is None)
        if _is_chat(prompt):
            if place == "text" and self._prefix is not None:
                raise RunError("the prefix is plain text, no chat. Use read(chat=True), or restore(None).")
            return self.text.dialogue(prompt, place, tools=tools, arguments=arguments)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[call-overload, arg-type]

    def _begin(self, ids: list[int], progress: Progress | None) -> tuple[int, Progress]:
        """Restore the longest known prefix of a prompt (see `Reader.begin`); the ids to read are `_said`."""
        self._settle()
        self._said = [*(self._prefix.unread if self._prefix else ()), *ids]
        return self._reader.begin(self._said, progress)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
