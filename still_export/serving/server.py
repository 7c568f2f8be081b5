"""A server that listens until a signal and then finishes running requests."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from still_export.errors import ConfigError
from still_export.serving.app import Settings, make_app
from still_export.serving.connection import ACCEPTED, QUEUE, Connections, report_once
from still_export.serving.worker import Worker


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is a free one.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=QUEUE)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}. Choose others: --host, --port.") from error


def is_local(sock: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


class Server(uvicorn.Server):
    """Serves a worker's model until SIGTERM, SIGINT or SIGHUP; a second SIGINT does not wait for running requests.

    Args:
        stop_timeout_s: Requests still running so long after the first signal are cut off.
    """

    def __init__(
        self, worker: Worker, settings: Settings, stop_timeout_s: int = 30, connections: Connections | None = None
    ) -> None:
        self.worker = worker
        config = uvicorn.Config(
            make_app(worker, settings),
            http=connections or Connections(),  # type: ignore[arg-type]  # called as a class is
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=stop_timeout_s,
            backlog=ACCEPTED,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, do not raise the signal again at the end, which would turn a graceful end into an error."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_exception_handler(report_once())
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(QUEUE)  # asyncio uses one number for backlog and accepts

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; uvicorn calls it ten times a second."""
        return await super().on_tick(counter) or not self.worker.alive

    async def shutdown(self, sockets: Any = None) -> None:
        """Refuse new requests and finish running ones."""
        self.worker.stop()
        await super().shutdown(sockets)
