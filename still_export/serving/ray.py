"""The ingress of Ray Serve LLM, named by deploy/ray/still.yaml."""

from __future__ import annotations

from ray.serve.llm.ingress import OpenAiIngress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from still_export.serving.replies import to_the_end


class StillIngress(OpenAiIngress):
    """Ray's ingress with an error at the end of broken streams, which otherwise look like complete answers (Ray 2.60)."""

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return _explained(await super().completions(body, request))

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        return _explained(await super().chat(body, request))


def _explained(response: Response) -> Response:
    if isinstance(response, StreamingResponse):
        response.body_iterator = to_the_end(response.body_iterator)
    return response
