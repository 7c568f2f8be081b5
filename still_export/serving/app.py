"""The HTTP side of a server: OpenAI's paths over a worker. Thin: what a request means is in wire, what becomes of it in the scheduler."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import math
import os
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from still_export.package.files import check_hash
from still_export.runtime.base import Runner
from still_export.runtime.sampling import RunError
from still_export.serving.metrics import CONTENT_TYPE, Metrics
from still_export.serving.replies import Answered, Reply, line
from still_export.serving.requests import Event, QueueFullError, Request, StoppingError
from still_export.serving.responses import ResponseReply, as_chat
from still_export.serving.wire import ApiError, Chat, Completion, ParsedRequest, to_submit, understood
from still_export.serving.worker import Worker

BODY_S = 30.0
"""Timeout of a request's body."""

STALLED_S = 30.0
"""The server is busy after a call of the model that takes longer."""

TOKENIZERS = 2
"""Prompts tokenized at the same time; a tokenizer needs over a hundred bytes of memory per byte of a prompt."""

INDEX = "index.html"
PAGE = {"page.js": "text/javascript", "markdown.js": "text/javascript", "style.css": "text/css"}
"""The chat page and its parts with their types."""

SAMPLING = ("do_sample", "temperature", "top_p", "top_k")
"""Fields of generation_config.json that the page starts with; requests have OpenAI's defaults."""

HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?", re.ASCII)
"""A Host header: name or address, and port. Anything else, such as a user before @, other programs read in other ways."""

GONE = 499
"""Status in metrics of a request whose client left."""


@dataclass(frozen=True)
class Settings:
    """HTTP settings.

    name: The model's name. api_key: None: none is needed. body_bytes: Most bytes of a request.
    shared: Requests without a salt share cached prefixes, as those of one user; None: if there is no key.
    hosts: Allowed Host names besides localhost and addresses; None: any. They stop DNS rebinding: a page of another site can point its own
        name to this machine, but its requests carry that name.
    origins: Whose pages may use the server from a browser; "*": any.
    """

    name: str
    api_key: str | None = None
    body_bytes: int = 4 << 20
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()
    shared: bool | None = None

    def scope(self, salt: str | None, published: bool) -> tuple[int, ...] | None:
        """The scope of a request's cached prefixes (see `Request`)."""
        if salt is not None:  # negative numbers, which are no tokens
            return tuple(
                int(n)
                for n in -1
                - np.frombuffer(hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:16], "<i4") % (1 << 30)
            )
        return () if published or (self.api_key is None if self.shared is None else self.shared) else None


def make_app(worker: Worker, settings: Settings) -> Starlette:
    """The application that serves a worker's model."""
    server = _Server(worker, settings)
    keyed, api = server.keyed, server.answered
    cross = Middleware(
        CORSMiddleware, allow_origins=settings.origins, allow_methods=("GET", "POST"), allow_headers=("*",)
    )
    return Starlette(
        middleware=[cross] if settings.origins else [],
        routes=[
            Route("/", api(server.page)),
            *(Route(f"/{name}", api(server.page)) for name in PAGE),
            Route("/health", api(server.health)),
            Route("/metrics", api(server.metrics_text)),
            Route("/v1/models", api(keyed(server.models))),
            Route("/v1/models/{model:path}", api(keyed(server.model))),
            Route("/v1/completions", api(keyed(server.completions)), methods=["POST"]),
            Route("/v1/chat/completions", api(keyed(server.chat)), methods=["POST"]),
            Route("/v1/responses", api(keyed(server.responses)), methods=["POST"]),
            Route("/v1/embeddings", api(keyed(server.embeddings)), methods=["POST"]),
            Route("/v1/prefixes", api(keyed(server.prefixes)), methods=["POST"]),
        ],
        exception_handlers={HTTPException: server.refuse},
    )


Handler = Callable[[HttpRequest], Awaitable[Response]]


class _Server:
    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        self.metrics = Metrics(worker.scheduler)
        self.generation = _sampling_settings(worker.scheduler.model)
        self.created = int(time.time())
        self._arriving: dict[asyncio.Task[bytes], None] = {}  # bodies being received, the oldest first
        self._reading = 0
        self._tokenizers = CapacityLimiter(TOKENIZERS)

    def answered(self, handler: Handler) -> Handler:
        """`handler` with errors as answers; answers are counted."""

        async def handle(request: HttpRequest) -> Response:
            two_lengths = "transfer-encoding" in request.headers and "content-length" in request.headers
            try:
                if two_lengths:  # a proxy in front of this server may use the other one
                    raise ApiError(400, "the request has Content-Length and Transfer-Encoding. Send one of them.")
                if self.settings.hosts is not None:
                    _check_host(request.headers.get("host", ""), self.settings.hosts)
                response = await handler(request)
            except ApiError as error:
                again = {"retry-after": "1"} if error.status in (429, 503) else None
                response = _json(error.to_dict(), error.status, again)
            except ClientDisconnect:
                response = Response(status_code=GONE)
            except Exception as error:  # a bug here must not stop other requests
                traceback.print_exception(error)
                response = _json(ApiError(500, "the server failed on this request.").to_dict(), 500)
            if two_lengths:
                response.headers["connection"] = "close"
            path = request.scope["route"].path
            self.metrics.responses.labels(path, str(response.status_code)).inc()
            return response

        return handle

    def keyed(self, handler: Handler) -> Handler:
        """`handler`, which requires the key if there is one."""

        async def handle(request: HttpRequest) -> Response:
            if self.settings.api_key is not None:
                scheme, _, token = request.headers.get("authorization", "").partition(" ")
                same = hmac.compare_digest(token.strip().encode("latin-1"), os.fsencode(self.settings.api_key.strip()))
                if scheme.lower() != "bearer" or not same:
                    message = "the API key is missing or wrong; send it as Authorization: Bearer KEY."
                    raise ApiError(401, message, None, "invalid_api_key")
            return await handler(request)

        return handle

    async def refuse(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = "this server has /v1/chat/completions, /v1/completions, /v1/responses, /v1/prefixes, /v1/models, /health and /metrics."
        message = f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}; {known}"
        self.metrics.responses.labels("other", str(error.status_code)).inc()
        return _json(ApiError(error.status_code, message).to_dict(), error.status_code, error.headers)

    async def page(self, request: HttpRequest) -> Response:
        """A file of the chat page. The page contains no secret; it asks for the key if there is one."""
        name = request.url.path[1:] or INDEX
        text = resources.files("still_export.serving").joinpath("page", name).read_text(encoding="utf-8")
        headers = {"content-security-policy": "default-src 'self'; img-src data:", "cache-control": "no-cache"}
        kind = PAGE.get(name, "text/html")
        return Response(text.replace('data-mode="local"', 'data-mode="api"', 1), headers=headers, media_type=kind)

    async def health(self, request: HttpRequest) -> Response:
        """200 while the server accepts requests and the model answers."""
        scheduler = self.worker.scheduler
        if scheduler.stopping:
            raise ApiError(503, "the server is stopping.")
        if scheduler.broken or not self.worker.alive:
            raise ApiError(503, "the model failed on its last call; the server's log has the reason.")
        if (stalled_s := self.worker.stalled_s) > STALLED_S:
            raise ApiError(503, f"the server is busy: one call of the model has lasted {stalled_s:.0f} s so far.")
        return _json({"status": "ok", "running": scheduler.running, "waiting": scheduler.queued})

    async def metrics_text(self, request: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        if request.path_params["model"] != self.settings.name:
            message = f"there is no such model here; this server has {self.settings.name!r}."
            raise ApiError(404, message, "model", "model_not_found")
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        context = self.worker.scheduler.context
        named = {"id": self.settings.name, "object": "model", "created": self.created, "owned_by": "still-export"}
        return {**named, "max_model_len": context, "generation_config": self.generation}

    async def completions(self, request: HttpRequest) -> Response:
        return await self._answer(request, Completion)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, Chat)

    async def embeddings(self, request: HttpRequest) -> Response:
        raise ApiError(
            404,
            f"{self.settings.name} predicts tokens and was not trained to give embeddings of texts; serve an embedding model elsewhere.",
            "model",
            "model_not_supported",
        )

    async def _answer(self, http: HttpRequest, kind: type[Completion] | type[Chat]) -> Response:
        request = await self._read(http, kind)
        return await self._replied(http, request, Reply(request, self.settings.name, self.worker.scheduler.text))

    async def responses(self, http: HttpRequest) -> Response:
        body: dict[str, Any] = {}

        def converted(content: Any) -> Any:
            body.update(content if isinstance(content, dict) else {})
            return as_chat(content)

        request = await self._read(http, Chat, converted)
        return await self._replied(http, request, ResponseReply(request, self.settings.name, body))

    async def _replied(self, http: HttpRequest, request: ParsedRequest, reply: Reply | ResponseReply) -> Response:
        jobs, events = self._submit(request)
        if request.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            chunks = self._chunks(http, jobs, events, reply)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
        answers = [Answered() for _ in jobs]
        async for index, event in self._events(http, jobs, events):
            _check(event)
            answers[index].add(event)
        return _json(reply.whole(_counted(answers, jobs)))

    async def prefixes(self, http: HttpRequest) -> Response:
        """Read a document in advance, so that later questions about it need not."""
        scheduler = self.worker.scheduler
        if scheduler.prefixes is None:
            raise ApiError(400, "this server has no prefix cache: start it with --prefix-cache 2GiB, or another size.")

        request = await self._read(http, None)
        jobs, events = self._submit(request, warm=True)
        async for _, event in self._events(http, jobs, events):
            _check(event)
        usage = Reply(request, self.settings.name).usage(_counted([Answered() for _ in jobs], jobs))
        return _json({"object": "prefix", "model": self.settings.name, "usage": usage})

    async def _read(
        self,
        http: HttpRequest,
        kind: type[Completion] | type[Chat] | None,
        converted: Callable[[Any], Any] = lambda content: content,
    ) -> ParsedRequest:
        """Parse a request, of which `converted` makes one of this kind, at most as many at a time as can be answered.

        `kind` None: a text or a chat to be read ahead.
        """
        scheduler = self.worker.scheduler
        body = await self._body(http)
        if self._reading >= scheduler.places:
            message = f"{self._reading} requests are being read, which is the limit. Ask again later."
            raise ApiError(429, message, None, "rate_limit_exceeded")

        def understand() -> ParsedRequest:
            content, name = converted(_parsed(body)), self.settings.name
            chosen = kind or (Chat if isinstance(content, dict) and "messages" in content else Completion)
            vocabulary = scheduler.model.manifest["model"]["vocab_size"]
            asked = understood(chosen, content, name)
            return to_submit(asked, scheduler.text, scheduler.context, vocabulary, warm=kind is None)

        self._reading += 1
        try:
            return await to_thread.run_sync(understand, limiter=self._tokenizers)
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply.", None, "invalid_value") from None
        finally:
            self._reading -= 1

    async def _body(self, http: HttpRequest) -> bytes:
        """The body of a request; if too many are arriving, the slowest is dropped, so that stalled clients occupy no place."""
        if len(self._arriving) >= self.worker.scheduler.places:
            next(iter(self._arriving)).cancel()
        task = asyncio.ensure_future(_read_body(http, self.settings.body_bytes))
        self._arriving[task] = None
        try:
            await asyncio.wait((task,))
            if task.cancelled():
                message = "the body arrives more slowly than too many others. Ask again later."
                raise ApiError(429, message, None, "rate_limit_exceeded")
            return task.result()
        finally:
            task.cancel()
            self._arriving.pop(task, None)

    def _submit(
        self, request: ParsedRequest, warm: bool = False
    ) -> tuple[list[Request], asyncio.Queue[tuple[int, Event]]]:
        """Submit a job for each choice; their events come with their numbers."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def listener(index: int, event: Event) -> None:
            if not loop.is_closed():  # the server was killed
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        jobs, scope = list[Request](), self.settings.scope(request.salt, warm)
        try:
            for index, choice in enumerate(request.choices):
                prompt, most, sampling = choice.prompt, choice.max_tokens, choice.sampling
                hear = partial(listener, index)
                job = Request(
                    prompt, most, sampling, hear, request.stop, request.ignore_eos, warm, request.marks, scope
                )
                self.worker.submit(job)
                jobs.append(job)
        except RunError as error:
            for job in jobs:
                self.worker.cancel(job)
            if isinstance(error, QueueFullError):
                raise ApiError(429, str(error), None, "rate_limit_exceeded") from None
            if isinstance(error, StoppingError):
                raise ApiError(503, str(error)) from None
            raise ApiError(400, str(error), "messages" if request.chat else "prompt") from None
        return jobs, events

    async def _events(
        self, http: HttpRequest, jobs: list[Request], events: asyncio.Queue[tuple[int, Event]]
    ) -> AsyncIterator[tuple[int, Event]]:
        """Events of all jobs up to their last; ClientDisconnect, and free rows, where the client leaves before."""
        gone = asyncio.ensure_future(_gone(http))
        ended = dict[int, str]()
        try:
            while len(ended) < len(jobs):
                event = asyncio.ensure_future(events.get())
                try:
                    await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
                    if not event.done():
                        raise ClientDisconnect
                finally:
                    event.cancel()
                index, found = event.result()
                if found.ended:
                    ended[index] = found.ended
                yield index, found
        finally:
            gone.cancel()
            for index, job in enumerate(jobs):
                self.worker.cancel(job)
                self.metrics.observe(job, ended.get(index, "cancelled"), time.perf_counter())

    async def _chunks(
        self,
        http: HttpRequest,
        jobs: list[Request],
        events: asyncio.Queue[tuple[int, Event]],
        reply: Reply | ResponseReply,
    ) -> AsyncIterator[str]:
        """The lines of a streamed answer."""
        try:
            for chunk in reply.first():
                yield line(chunk)
            async for index, event in self._events(http, jobs, events):
                _check(event)
                found = reply.piece(index, event)
                for chunk in [found] if isinstance(found, dict) else found:
                    yield line(chunk)
            for chunk in reply.last(_counted([Answered() for _ in jobs], jobs)):
                yield line(chunk)
            if isinstance(reply, Reply):
                yield "data: [DONE]\n\n"
        except ApiError as error:  # the status has already been sent
            yield line(error.to_dict())
        except ClientDisconnect:
            return


def _counted(answers: list[Answered], jobs: list[Request]) -> list[Answered]:
    """The answers with their numbers of tokens."""
    for answer, job in zip(answers, jobs, strict=True):
        answer.tokens, answer.cached = len(job.tokens), job.cached
    return answers


def _sampling_settings(model: Runner) -> dict[str, float]:
    """Sampling settings of the model's publisher, from the package's generation_config.json; {} if it cannot be read."""
    name = "generation_config.json"
    try:
        settings = json.loads(check_hash(model.folder, model.manifest, name).read_bytes())
    except (OSError, ValueError, RecursionError, RunError):
        return {}
    found = {field: settings.get(field) for field in SAMPLING} if isinstance(settings, dict) else {}
    return {field: value for field, value in found.items() if isinstance(value, int | float) and math.isfinite(value)}


def _check(event: Event) -> None:
    if status := {"failed": 500, "invalid": 400, "refused": 503}.get(event.ended or ""):
        raise ApiError(status, event.error)


def _check_host(header: str, hosts: frozenset[str]) -> None:
    """Refuse a request to a name that is not this server's."""
    found = HOST.fullmatch(header.strip())
    name = found[1].strip("[]").rstrip(".").lower() if found else ""
    if name in hosts or name == "localhost" or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        message = f"this server does not answer to the host {header[:100]!r}. Start it with --allowed-host NAME."
        raise ApiError(403, message, None, "host_not_allowed") from None


async def _read_body(http: HttpRequest, most: int) -> bytes:
    """The body, as far as it may be read."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites may not send this type
        raise ApiError(415, f"the content type is {kind[:64]!r}; send application/json.")
    too_long = ApiError(413, f"the body is longer than the limit of {most} bytes. Shorten the prompt.")
    declared = http.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > most:
        raise too_long

    async def read() -> bytes:
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > most:
                raise too_long
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s.") from None


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}.", None, "invalid_json") from None


def _no_number(name: str) -> None:
    """Refuse NaN and Infinity, which Python's reader accepts."""
    raise ValueError(f"{name} is not a JSON number")


async def _gone(http: HttpRequest) -> None:
    """Returns when the client has left; its whole body was read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _json(value: object, status: int = 200, headers: Any = None) -> Response:
    """Of ASCII alone: an error may quote half a surrogate pair."""
    return Response(json.dumps(value), status, headers, media_type="application/json")
