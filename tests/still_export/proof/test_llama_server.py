"""`verify http://...` against llama-cpp-python's server: right, and with another file than --model names."""

import importlib.util
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx2
import pytest
import torch

from tests.still_export.linear_models import linear_model
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.training import byte_tokenizer
from tests.still_export.verbs import call

NEEDED = ("llama_cpp", "fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)), reason="needs a server: pip install 'llama-cpp-python[server]'"
    ),
]
SIZES: dict[str, Any] = dict(
    hidden_size=64, head_dim=32, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16
)
ENDING = 256


def with_words(writer: Any) -> None:
    words = sorted(byte_tokenizer().get_vocab().items(), key=lambda word: word[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([gguf.TokenType.NORMAL] * ENDING + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])  # it asks for some; the result is no word
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(ENDING)
    writer.add_eos_token_id(ENDING)


def hybrid(seed: int = 1) -> Any:
    """A Falcon-H1 whose likeliest tokens are letters, and clearly so."""
    model = linear_model(
        "falcon_h1", seed=seed, vocab_size=ENDING + 1, mamba_rms_norm=False, eos_token_id=ENDING, **SIZES
    )
    letters = byte_tokenizer().convert_tokens_to_ids(list(string.ascii_letters))
    with torch.no_grad():
        rows = torch.zeros_like(model.lm_head.weight)
        rows[letters] = 8 * model.lm_head.weight[letters]
        model.lm_head.weight.copy_(rows)
    return model


@contextmanager
def served(path: Path) -> Iterator[str]:
    """The address of a server of a GGUF file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", str(path), "--n_ctx", "1024", "--n_threads", "1", "--host", "127.0.0.1", "--port", str(port)]
    log = path.with_suffix(".log").open("w")
    process = subprocess.Popen([sys.executable, "-m", "llama_cpp.server", *words], stdout=log, stderr=log)
    try:
        for _ in range(300):
            assert process.poll() is None, path.with_suffix(".log").read_text()
            try:
                httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=1, trust_env=False)
                break
            except httpx2.HTTPError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def test_a_server_of_the_file_passes_and_one_of_another_fails(tmp_path: Path) -> None:
    """The other differs in one matrix of one layer."""
    model = hybrid()
    write_gguf(tmp_path / "right.gguf", model, extra=with_words)
    byte_tokenizer().save_pretrained(tmp_path / "right.folder")
    with torch.no_grad():
        model.model.layers[1].mamba.out_proj.weight.mul_(0.8)
    write_gguf(tmp_path / "other.gguf", model, extra=with_words)
    asked = ("--model", tmp_path / "right.folder", "--lengths", "5,40,65")
    with served(tmp_path / "right.gguf") as address:
        assert call("verify", address, *asked) == 0
    with served(tmp_path / "other.gguf") as address:
        assert call("verify", address, *asked) == 1
