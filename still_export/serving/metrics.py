"""Prometheus metrics of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from still_export.serving.requests import Request
from still_export.serving.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counters of one server, in their own registry.

    Args:
        scheduler: Source of the gauges, read on request.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"still_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"still_{name}", text, buckets=buckets, registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"still_{name}", text, registry=self._registry)

        self.responses = counter("http_responses", "Responses by path and status.", "path", "status")
        self._ended = counter("requests_ended", "Requests by how they ended.", "ended")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._generated = counter("generated_tokens", "Generated tokens of requests that ended.")
        self._first = histogram("first_token_seconds", "From a request's arrival to its first token.", SECONDS)
        self._token = histogram("token_seconds", "Mean time of an answer's tokens after the first.", TOKEN_SECONDS)
        self._whole = histogram("request_seconds", "From a request's arrival to its end.", SECONDS)
        gauge("requests_running", "Requests that have a row.").set_function(lambda: scheduler.running)
        gauge("requests_waiting", "Requests that wait for a row.").set_function(lambda: scheduler.queued)
        if (prefixes := scheduler.prefixes) is not None:
            gauge("prefix_hit_rate", "Share of all prompt tokens so far that were not read again.").set_function(
                lambda: prefixes.hit_tokens / max(1, prefixes.prompt_tokens)
            )
            gauge("prefix_bytes", "Memory of the states in the prefix cache.").set_function(lambda: prefixes.bytes)
            gauge("prefixes", "States in the prefix cache.").set_function(lambda: prefixes.states)
        if (speculation := scheduler.model.speculation) is not None:
            for name, text, read in (
                ("guessed_tokens", "Tokens that were guessed.", lambda: speculation.guesses),
                ("accepted_tokens", "Guessed tokens that were accepted.", lambda: speculation.accepted),
                ("guessing_steps", "Steps with guesses.", lambda: speculation.steps),
                (
                    "guesses_won_seconds",
                    "Time that guesses saved; below 0 if they cost time.",
                    lambda: speculation.won_s,
                ),
            ):
                gauge(name, text).set_function(read)
        gauge("state_bytes", "Memory of the state.").set_function(lambda: scheduler.state_bytes(scheduler.model.room))

    def observe(self, request: Request, ended: str, now: float) -> None:
        """Count a request that ended at `now`, by time.perf_counter()."""
        self._ended.labels(ended).inc()
        self._prompt.inc(len(request.prompt))
        self._generated.inc(len(request.tokens))
        self._whole.observe(now - request.arrived)
        if request.first:
            self._first.observe(request.first - request.arrived)
            if len(request.tokens) > 1:
                self._token.observe((now - request.first) / (len(request.tokens) - 1))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
