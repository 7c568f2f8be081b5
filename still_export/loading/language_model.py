"""A package's model on any runtime: text and chats in, answers out, states that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
"""A text to continue, token ids, or the messages of a chat; a final message of the assistant is continued."""
Tools = Sequence[Mapping[str, Any]] | None
Arguments = Mapping[str, Any] | None


class LanguageModel:
    """A package's model. It has one state, which calls update in place: calls of several threads wait for one another, and a call ends a
    stream that is still open, which raises RunError when it is read on.

    Each call starts from the prefix: initially empty, then the state after `read` or `restore`.

        model.read(document, chat=True)                      # once; seconds for a long one
        model.snapshot().save("document.safetensors")
        model.generate([{"role": "user", "content": " When was it signed?"}])      # any number of times

    Args:
        runner: Runner of any runtime.
        prefixes: Cache of states of prompts and answers; a call then reads only what is new in its prompt. None: no cache.
        text: Tokenizer and chat format being loaded; None: they are loaded when needed.
    """

    def __init__(self, runner: Runner, prefixes: PrefixCache | None = None, text: TextAhead | None = None) -> None:
        self.runner, self.prefixes, self._ahead = runner, prefixes, text
        self._last: Answer | None = None
        self._text: Text | None = None
        with runner.turns.lock:
            runner.start()
            self._begin_with(None)

    def use_adapter(self, adapter: str | Path | None) -> None:
        """Replace the LoRA adapter on the package's weights, or (None) remove it. The prefix is dropped.

        Args:
            adapter: Folder in PEFT's format.

        Raises:
            ConfigError: The package was exported without --adapters, or has no inputs for an adapted module.
            CheckpointError: The adapter is damaged, or belongs to another model.
            RunError: The runtime does not support adapters.
        """
        inputs, digest = {}, ""
        if adapter is not None:
            from still_export.models.read.adapters import adapter_digest, adapter_inputs

            inputs = adapter_inputs(Path(adapter), self.runner.manifest)
            digest = adapter_digest(inputs)
        with self.runner.turns.lock:
            self.runner.use_adapter(inputs, digest)
            if self.prefixes is not None:  # its states, also in its folder, belong to the previous weights
                self.prefixes.close()
                self.prefixes.clear()
                self.prefixes.folder = None
            self.restore(None)

    @property
    def text(self) -> Text:
        """Tokenizer and chat format; RunError if the package has none."""
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
        tools: Tools = None,
        tool_choice: str | None = None,
        response_format: Arguments = None,
        chat_template_kwargs: Arguments = None,
        **sampling: Any,
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        tools: Tools = None,
        tool_choice: str | None = None,
        response_format: Arguments = None,
        chat_template_kwargs: Arguments = None,
        **sampling: Any,
    ) -> Iterator[str]: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        tools: Tools = None,
        tool_choice: str | None = None,
        response_format: Arguments = None,
        chat_template_kwargs: Arguments = None,
        **sampling: Any,
    ) -> Answer | Iterator[str]:
        """Continue `prompt` after the prefix.

        Args:
            prompt: A text, token ids, or messages of a chat: "role" and "content" (a text or text parts), "tool_calls",
                "reasoning_content". If the prefix ends inside a user's message (`read(chat=True)`), the first message continues it.
            stream: Return pieces of text as they are generated. Another call before the last piece ends it.
            max_tokens: Most tokens of the answer.
            stop: Texts that end the answer and are not part of it.
            tools: For chats: JSON schemas of functions, as in OpenAI's API.
            tool_choice: none, auto, required, or a tool's name. Calls are in the answer's `message`.
            response_format: The form of the answer, as in OpenAI's API: {"type": "json_schema", "json_schema": {"schema": ...}}, or
                {"type": "json_object"}. It needs llguidance.
            chat_template_kwargs: For chats: arguments of the model's template, such as `enable_thinking`.
            sampling: Fields of `Sampling`: temperature (0 = greedy, the default), top_k, top_p, min_p, seed, presence_penalty,
                frequency_penalty, repetition_penalty, logit_bias, logprobs (then in the answer's `sampling.found`).

        Raises:
            RunError: It does not fit into the package's capacity, or the chat template refuses it. Nothing was read then.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        with self.runner.turns.lock:
            answer = self.answer(
                prompt,
                max_tokens,
                Sampling(**sampling),
                stops,
                as_text="tokenizer.json" in self.runner.manifest["files"],
                tools=tools,
                tool_choice=tool_choice,
                response_format=response_format,
                chat_template_kwargs=chat_template_kwargs,
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
        tool_choice: str | None = None,
        response_format: Arguments = None,
        chat_template_kwargs: Arguments = None,
    ) -> Answer:
        """An answer generated while it is iterated; `generate` with more options.

        Args:
            as_text: False: pieces are token ids.
            progress: Called with the parts of the prompt read so far.
            stopped: Called before every token; True ends the answer.
            tools, tool_choice, response_format, chat_template_kwargs: See `generate`.
        """
        if max_tokens < 1:
            raise RunError(f"max_tokens={max_tokens}; it must be at least 1.")
        with self.runner.turns.lock:
            ids, turn = self._ids(prompt, tools, chat_template_kwargs), self.runner.turns.take()
            known, progress = self._begin(ids, progress)
            self._place = "answer" if _is_chat(prompt) else "text"
            calls = None
            if as_text and (tools or response_format):
                from still_export.runtime.grammar import LarkGrammar, answer_lark
                from still_export.runtime.tool_calls import ToolCalls

                if lark := answer_lark(self.text, self._prompt_ids, response_format, tools, tool_choice):
                    sampling.grammar = LarkGrammar(self.text, self.runner.manifest["model"]["vocab_size"], lark)
                if tools and tool_choice != "none":
                    calls = partial(ToolCalls.of, self.text, tools)
            self._last = answer = Answer(
                self.runner,
                self.text if as_text else None,
                self._prompt_ids[known:],
                max_tokens,
                sampling,
                stop=stop,
                progress=progress,
                stopped=stopped,
                cached=known,
                before=self._prompt_ids[:known],
                turn=turn,
                calls=calls,
            )
            return answer

    def read(
        self,
        prompt: str | Sequence[int],
        *,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Arguments = None,
        progress: Progress | None = None,
    ) -> Snapshot:
        """Read a text after the prefix; both together are the prefix of later calls.

        Args:
            prompt: A text or token ids.
            chat: The text begins a user's message, which the first message of a later call continues.
            system: System message of that chat.
            chat_template_kwargs: Arguments of the model's template.
            progress: Called with the parts read so far.

        Raises:
            RunError: The text does not fit, the package has no chat format, or the model needs whole prompts.
        """
        with self.runner.turns.lock:
            if chat and self._prefix is not None:
                raise RunError("a chat begins with its first text: restore(None) first.")
            ids = self.text.opening(str(prompt), system, chat_template_kwargs) if chat else self._ids(prompt)
            self.runner.turns.take()
            known, progress = self._begin(ids, progress)
            if self._prompt_ids:
                self.runner.prefill(self._prompt_ids[known:], progress)
            self._place = "user" if chat else "text"
            found = self.snapshot()
            self._begin_with(found)
            return found

    def snapshot(self) -> Snapshot:
        """The state after the last call, with its tokens; `Snapshot.save` writes it to a file."""
        with self.runner.turns.lock:
            tokens = self._prompt_ids + (self._last.tokens if self._last else [])
            text_tokens = self.runner.feeding.text_tokens
            read = text_tokens(int(self.runner.length[0])) - (text_tokens(self._prefix.length) if self._prefix else 0)
            return Snapshot.of(self.runner, self._place, tuple(tokens[read:]))

    def restore(self, snapshot: Snapshot | str | Path | None) -> None:
        """Start later calls from a snapshot, its file, or (None) from the empty state.

        Raises:
            RunError: The snapshot belongs to another package, or is none.
        """
        if isinstance(snapshot, str | Path):
            snapshot = Snapshot.load(snapshot)
        with self.runner.turns.lock:
            self._settle()
            self.runner.turns.take()
            if snapshot is not None:
                snapshot.restore(self.runner)  # raises if it does not fit
            self._begin_with(snapshot)

    def _begin_with(self, prefix: Snapshot | None) -> None:
        self._prefix, self._place = prefix, prefix.place if prefix else "text"
        self._prompt_ids = list(prefix.unread) if prefix else []
        self._reader = Reader(self.runner, self.prefixes, prefix)

    def _settle(self) -> None:
        """Cache the state of the last call if it was completed."""
        if self._last is not None and self._last.whole:
            self._reader.end(self._prompt_ids + self._last.tokens)
        self._last = None

    def _ids(self, prompt: Prompt, tools: Tools = None, arguments: Arguments = None) -> list[int]:
        """Token ids of a prompt after the prefix."""
        place = "text" if self._prefix is None else self._prefix.place
        if isinstance(prompt, str):
            return self.text.encode(prompt, special=self._prefix is None)
        if _is_chat(prompt):
            if place == "text" and self._prefix is not None:
                raise RunError("the prefix is plain text, not a chat. Use read(chat=True), or restore(None).")
            return self.text.dialogue(prompt, place, tools=tools, arguments=arguments)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[call-overload, arg-type]

    def _begin(self, ids: list[int], progress: Progress | None) -> tuple[int, Progress]:
        """Set the runner to the prefix and the cached part after it, as in `Reader.begin`; `_prompt_ids` has the ids to read."""
        self._settle()
        self._prompt_ids = [*(self._prefix.unread if self._prefix else ()), *ids]
        return self._reader.begin(self._prompt_ids, progress)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
