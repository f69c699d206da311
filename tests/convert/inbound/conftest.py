"""Clients of the OpenAI and Anthropic SDKs for a server with an inbound API and fixed answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import pytest

from gymsdk.convert.anthropic import format_token_count
from gymsdk.convert.api import ApiError, InvalidRequest
from gymsdk.convert.apis import INBOUND_APIS
from gymsdk.jsonl import dump_json
from gymsdk.types import Item

BuildClient: TypeAlias = Callable[..., Any]


class FixedServer(ThreadingHTTPServer):
    """A server that answers with *outcome*, and keeps the last request that it has parsed."""

    outcome: Item | ApiError
    request: Item
    daemon_threads = True

    def serve(self, client: Any, outcome: Item | ApiError) -> Any:
        self.outcome = outcome
        return client

    def answer(self, path: str, body: Item) -> tuple[int, bytes]:
        """Return the status and the body of an answer; those of a stream if the request asks for one."""
        inbound_api = INBOUND_APIS[path.removesuffix("/count_tokens")]
        outcome = self.outcome
        try:
            self.request = inbound_api.parse_request(body)
        except InvalidRequest as error:
            return 400, dump_json(inbound_api.build_error(ApiError(400, str(error))))
        if path.endswith("/count_tokens"):
            return 200, dump_json(format_token_count(7))
        if isinstance(outcome, ApiError):
            if body.get("stream"):
                return 200, inbound_api.heartbeat + inbound_api.build_error_frames(outcome)
            return outcome.status, dump_json(inbound_api.build_error(outcome))
        answer = inbound_api.build_answer(outcome, body)
        if body.get("stream"):
            return 200, inbound_api.heartbeat + b"".join(inbound_api.stream_events(answer, body))
        return 200, dump_json(answer)


class Handler(BaseHTTPRequestHandler):
    server: FixedServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, data = self.server.answer(self.path.removeprefix("/v1/"), body)
        is_stream = status == 200 and body.get("stream")
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write no access log."""


@pytest.fixture(scope="module")
def server() -> Iterator[FixedServer]:
    with FixedServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def openai_client(server: FixedServer) -> Iterator[BuildClient]:
    """Yield a function that returns a client of the OpenAI SDK for a Response or an error."""
    from openai import OpenAI

    with OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x", max_retries=0) as client:
        yield partial(server.serve, client)


@pytest.fixture(scope="module")
def anthropic_client(server: FixedServer) -> Iterator[BuildClient]:
    """Yield a function that returns a client of the Anthropic SDK for a Response or an error."""
    from anthropic import Anthropic

    with Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x", max_retries=0) as client:
        yield partial(server.serve, client)
