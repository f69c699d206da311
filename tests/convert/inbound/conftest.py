"""Clients of the real SDKs in front of an inbound API with fixed answers."""

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

Served: TypeAlias = Callable[[Item | ApiError], OpenAI]


@pytest.fixture
def served() -> Served:
    """Gives the client of a server whose model says one Response, or of one in trouble."""

    def client(said: Item | ApiError) -> OpenAI:
        transport = httpx.MockTransport(lambda asked: answered(asked, said))
        return OpenAI(
            base_url="http://gym.test/v1", api_key="x", http_client=httpx.Client(transport=transport), max_retries=0
        )

    return client


def answered(asked: httpx.Request, said: Item | ApiError) -> httpx.Response:
    face, body = INBOUND_APIS[asked.url.path.removeprefix("/v1/")], json.loads(asked.content)
    face.parse_request(body)
    streamed = {"content-type": "text/event-stream"}
    if isinstance(said, ApiError):
        if body.get("stream"):
            return httpx.Response(200, content=face.heartbeat + face.build_error_frames(said), headers=streamed)
        return httpx.Response(said.status, json=face.build_error(said))
    answer = face.build_answer(said, body)
    if body.get("stream"):
        return httpx.Response(
            200, content=face.heartbeat + b"".join(face.stream_events(answer, body)), headers=streamed
        )
    return httpx.Response(200, json=answer)
