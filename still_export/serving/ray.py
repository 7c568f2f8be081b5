"""The ingress for Ray Serve LLM; deploy/ray/still.yaml uses it."""

from __future__ import annotations

from ray.serve.llm.ingress import OpenAiIngress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from still_export.serving.wire import to_the_end


class StillIngress(OpenAiIngress):
    """Ray's ingress, except for aborted streams, whose end looks like that of a complete answer (Ray 2.60)."""

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """/v1/completions."""
        return _explained(await super().completions(body, request))

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """/v1/chat/completions."""
        return _explained(await super().chat(body, request))


def _explained(response: Response) -> Response:
    if isinstance(response, StreamingResponse):
        response.body_iterator = to_the_end(response.body_iterator)
    return response
