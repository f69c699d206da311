"""OpenAI SDK clients of an inbound API with fixed answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import httpx
import pytest
from openai import OpenAI

from gymsdk.convert.api import ApiError
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.types import Item

BuildClient: TypeAlias = Callable[[Item | ApiError], OpenAI]


@pytest.fixture
def build_client() -> BuildClient:
    """Return a function that builds a client of a server with a fixed Response or error."""

    def client(outcome: Item | ApiError) -> OpenAI:
        transport = httpx.MockTransport(lambda request: respond(request, outcome))
        return OpenAI(
            base_url="http://gym.test/v1", api_key="x", http_client=httpx.Client(transport=transport), max_retries=0
        )

    return client


def respond(request: httpx.Request, outcome: Item | ApiError) -> httpx.Response:
    inbound_api, body = INBOUND_APIS[request.url.path.removeprefix("/v1/")], json.loads(request.content)
    inbound_api.parse_request(body)
    stream_headers = {"content-type": "text/event-stream"}
    if isinstance(outcome, ApiError):
        if body.get("stream"):
            return httpx.Response(
                200, content=inbound_api.heartbeat + inbound_api.build_error_frames(outcome), headers=stream_headers
            )
        return httpx.Response(outcome.status, json=inbound_api.build_error(outcome))
    answer = inbound_api.build_answer(outcome, body)
    if body.get("stream"):
        return httpx.Response(
            200,
            content=inbound_api.heartbeat + b"".join(inbound_api.stream_events(answer, body)),
            headers=stream_headers,
        )
    return httpx.Response(200, json=answer)
