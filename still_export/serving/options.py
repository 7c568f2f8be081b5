"""Options of a server, as flags of `serve`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from still_export.errors import ConfigError
from still_export.options import check_options, option


@dataclass(frozen=True)
class ServeOptions:
    """A server: its address, its clients, and how much it answers at once."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 = all of this machine's.")
    port: int = option(8000, "Port; 0 = a free one.", least=0, most=65535)
    name: str | None = option(None, "The model's name in requests.", shown="the folder's name")
    api_key: str | None = option(None, "Key that requests to /v1 must carry.", shown="none", env="STILL_API_KEY")
    allowed_host: tuple[str, ...] = option(
        (),
        "Host name that requests may use, besides localhost and addresses; repeatable.",
        shown="only these on this machine's own address, else any",
    )
    allowed_origin: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server from a browser, such as https://chat.example.com; * = any; repeatable.",
        shown="none",
    )
    rows: int = option(4, "Requests that run at the same time.", least=1, most=1024)
    max_queue: int = option(64, "Requests that wait; more are refused with 429.", least=0)
    max_context: int | None = option(
        None, "Tokens of a prompt and its answer.", shown="the package's capacity", least=2
    )
    max_body_kb: int | None = option(
        None, "Largest request, KB.", shown="64, and 64 bytes a token of the context", least=1
    )
    piece_tokens: int = option(256, "Prompt tokens read between two tokens of the other answers.", least=1)
    prefix_cache: str | None = option(
        None,
        "Memory for states of prompts and answers, so that they are not read again; 0 = none.",
        shown="1GiB on a CPU, 0 on a GPU",
    )
    prefix_dir: Path | None = option(
        None, "Folder that keeps these states after the server ends; at most as large as the cache."
    )
    reproducible: bool = option(
        False,
        "Answers are bitwise the same alone or among others, in one piece or many, cold or from cached states.",
    )
    stop_timeout: int = option(30, "Seconds that running requests have after SIGTERM.", least=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key (or STILL_API_KEY) is empty: give a key, or leave it out.")
        for origin in self.allowed_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(
                    f"--allowed-origin {origin}: an origin has a scheme, a host and no path. Give https://chat.example.com, for example."
                )
