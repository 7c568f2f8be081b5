"""Clients that mean harm, a thread a kind, for tools/soak_serve.py: they ask a server for so many seconds, and print what it answered.

Half requests, half bodies and idle connections, readers that take a byte a second, stop texts and bodies as long as they may be and
longer, wrong keys, names of other sites. None of them gets more than a few tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

HELD = 100
"""Connections that ask nothing, at a time."""


class Attack:
    """Attacks on the server at `host`:`port`, until `end`."""

    def __init__(self, host: str, port: int, model: str, key: str, end: float) -> None:
        self.host, self.port, self.model, self.key, self.end = host, port, model, key, end
        self.answers: Counter[str] = Counter()

    def run(self) -> None:
        """All kinds at once."""
        kinds: tuple[Callable[[], Any], ...] = (
            self.hold,
            self.half_bodies,
            self.read_slowly,
            self.stop_texts,
            self.large_bodies,
            self.keys,
            self.hosts,
        )
        threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def hold(self) -> None:
        """Connections with half a request, a byte more each second; the server ends them."""
        held = [self._connect(b"POST /v1/completions HTTP/1.1\r\nhost: lo") for _ in range(HELD)]
        until = min(self.end, time.monotonic() + 15)
        while held and time.monotonic() < until:
            for client in list(held):
                try:
                    client.sendall(b"c")
                    client.settimeout(0.001)
                    if not client.recv(1):
                        raise ConnectionResetError
                except TimeoutError:
                    continue
                except OSError:
                    held.remove(client)
                    client.close()
            time.sleep(1)
        if held and time.monotonic() < self.end:
            self.answers["half requests held 15 s"] += len(held)
        for client in held:
            client.close()

    def half_bodies(self) -> None:
        """More requests than the server reads at a time, whose bodies come to no end."""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.key}\r\n"
        head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        held = [self._connect(head.encode()) for _ in range(HELD)]
        time.sleep(max(0, min(5, self.end - time.monotonic())))
        for client in held:
            client.settimeout(0.001)
            with contextlib.suppress(OSError):
                if said := client.recv(100):
                    self.answers[f"half bodies: {said.split()[1].decode()}"] += 1
            client.close()

    def read_slowly(self) -> None:
        """A streamed answer, a byte a second."""
        asked = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with self._connect(head.encode() + body) as client:
            for _ in range(10):
                if not client.recv(1) or time.monotonic() > self.end:
                    return
                time.sleep(1)

    def stop_texts(self) -> None:
        """As long as they may be, and much longer."""
        for length in (1000, 23_000):
            stop = ["a" * (length - 1) + end for end in "bcde"]
            self._ask({"prompt": [1, 2], "max_tokens": 4, "stop": stop}, f"stop texts of {length}")
        time.sleep(0.5)

    def large_bodies(self) -> None:
        """Wrong in every item."""
        for name, wrong in (("prompt", [None] * 10_000), ("stop", [1] * 10_000), ("\ud800", 1), ("x" * 50_000, 1)):
            self._ask({"prompt": [1], "max_tokens": 1, name: wrong}, "wrong bodies")
        time.sleep(0.5)

    def keys(self) -> None:
        """Wrong ones."""
        self._ask({"prompt": [1]}, "wrong keys", {"authorization": f"Bearer {random.random()}"})
        time.sleep(0.05)

    def hosts(self) -> None:
        """Of a page whose name was turned to this machine's address."""
        self._ask({"prompt": [1]}, "other hosts", {"host": "attacker.example"})
        time.sleep(0.05)

    def _repeat(self, kind: Callable[[], Any]) -> None:
        while time.monotonic() < self.end:
            with contextlib.suppress(OSError, http.client.HTTPException):
                kind()
            time.sleep(0.01)

    def _connect(self, sent: bytes) -> socket.socket:
        client = socket.create_connection((self.host, self.port), timeout=10)
        client.sendall(sent)
        return client

    def _ask(self, fields: dict[str, Any], kind: str, headers: dict[str, str] | None = None) -> None:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        sent = {"content-type": "application/json", "authorization": f"Bearer {self.key}", **(headers or {})}
        try:
            connection.request("POST", "/v1/completions", json.dumps({"model": self.model, **fields}), sent)
            self.answers[f"{kind}: {connection.getresponse().status}"] += 1
        finally:
            connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--key", default="none")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    attack = Attack(options.host, options.port, options.model, options.key, time.monotonic() + options.seconds)
    attack.run()
    print(json.dumps(attack.answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
