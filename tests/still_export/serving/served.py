"""A server in a thread of the test's process."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import still_export
from still_export.serving.app import Settings
from still_export.serving.connection import Connections
from still_export.serving.scheduler import Scheduler
from still_export.serving.server import Server, listen
from still_export.serving.worker import Worker

JSON = {"content-type": "application/json"}


@dataclass
class Served:
    """A server in a thread, and what it serves in this one."""

    port: int
    worker: Worker
    server: Server
    thread: threading.Thread

    def client(self, key: str = "any", **options: Any) -> Any:
        """OpenAI's own."""
        import openai

        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, **options)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and parsed body of a plain request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, body, JSON if headers is None else headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        kind = response.headers.get_content_type()
        return response.status, json.loads(text) if kind == "application/json" else text.decode()


@contextlib.contextmanager
def serve(
    package: Path, settings: Settings, cache: Any = None, limits: Connections | None = None, **options: Any
) -> Iterator[Served]:
    """A server of `package`; `options` are the scheduler's."""

    def open_scheduler() -> Scheduler:
        model = still_export.load(package, threads=1)
        return Scheduler(model.runner, model.text, prefixes=cache and cache(model.runner), **options)

    with listen("127.0.0.1", 0) as sock:
        worker = Worker(open_scheduler)
        server = Server(worker, settings, connections=limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield Served(sock.getsockname()[1], worker, server, thread)
        finally:
            server.should_exit = True
            thread.join(20)
            worker.join(20)
        assert not thread.is_alive() and not worker.alive
