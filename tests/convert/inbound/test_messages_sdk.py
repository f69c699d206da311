"""The Anthropic SDK reads the answers of the Messages API, with and without streaming."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from anthropic import Anthropic, APIStatusError, BadRequestError, RateLimitError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.convert.anthropic import MESSAGES_API, format_token_count
from gymsdk.convert.api import ApiError, InvalidRequest
from gymsdk.jsonl import dump_json
from gymsdk.responses import build_usage
from gymsdk.types import Item

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
USER = {"role": "user", "content": "hi"}
OUTPUT = [
    responses.build_reasoning("hmm", "so", id="rs_1"),
    responses.build_reasoning(id="rs_2"),
    responses.build_message("I add.\u2028\x85"),
    responses.build_function_call("add", '{"a":1}', "c1"),
    responses.build_function_call("add", "{", "c2") | TOKENS,
]


class FixedServer(ThreadingHTTPServer):
    """A server that responds with *outcome*, and keeps the last request and the last message."""

    outcome: list[Item] | ApiError
    request: Item
    message: Item


class Handler(BaseHTTPRequestHandler):
    server: FixedServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self.server.request = MESSAGES_API.parse_request(body)
        except InvalidRequest as error:
            self.send(400, dump_json(MESSAGES_API.build_error(ApiError(400, str(error)))))
            return
        if self.path.endswith("/count_tokens"):
            self.send(200, dump_json(format_token_count(7)))
        elif isinstance(self.server.outcome, ApiError):
            self.send_error_body(self.server.outcome, stream_message=bool(body.get("stream")))
        else:
            self.send_answer(self.server.outcome, body)

    def send_answer(self, outcome: list[Item], body: Item) -> None:
        answer = MESSAGES_API.build_answer(
            responses.build_response(outcome, model="m", usage=build_usage(9, 4, cached_tokens=6)), body
        )
        self.server.message = answer
        if body.get("stream"):
            self.send(
                200, MESSAGES_API.heartbeat + b"".join(MESSAGES_API.stream_events(answer, body)), "text/event-stream"
            )
        else:
            self.send(200, dump_json(answer))

    def send_error_body(self, trouble: ApiError, *, stream_message: bool) -> None:
        if stream_message:
            self.send(200, MESSAGES_API.heartbeat + MESSAGES_API.build_error_frames(trouble), "text/event-stream")
        else:
            self.send(trouble.status, dump_json(MESSAGES_API.build_error(trouble)))

    def send(self, status: int, data: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write no access log."""


@pytest.fixture(scope="module")
def server() -> Iterator[FixedServer]:
    with FixedServer(("127.0.0.1", 0), Handler) as served:
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever, args=[0.01])
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def client(server: FixedServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x", max_retries=0) as client:
        yield client


def stream_message(client: Anthropic) -> Item:
    with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        return without_parsing(stream.get_final_message().to_dict())


def without_parsing(message: Item) -> Item:
    """Return *message* without the parsed fields and the nulls that some SDK versions add."""
    blocks = [{key: value for key, value in block.items() if value is not None} for block in message["content"]]
    return message | {"content": [{key: block[key] for key in block if key != "parsed_output"} for block in blocks]}


def test_the_sdk_reads_every_block_with_and_without_streaming(server: FixedServer, client: Anthropic) -> None:
    server.outcome = OUTPUT
    message = client.messages.create(model="m", max_tokens=9, messages=[USER])
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "thinking", "redacted_thinking", "text", "tool_use", "tool_use"]
    assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("tool_use", 6)
    folded = stream_message(client)
    assert folded == server.message


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(
    output=st.lists(
        st.one_of(
            st.text().map(responses.build_message),
            st.lists(st.text(), max_size=2).map(lambda texts: responses.build_reasoning(*texts)),
            st.builds(
                responses.build_function_call,
                st.text(min_size=1),
                st.text() | st.dictionaries(st.text(), st.integers(0, 9) | st.text()).map(json.dumps),
                st.text(min_size=1),
            ),
        ),
        max_size=4,
    )
)
def test_any_answer_is_the_same_with_streaming(server: FixedServer, client: Anthropic, output: list[Item]) -> None:
    server.outcome = output
    folded = stream_message(client)
    assert folded == server.message


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}'])
def test_unusual_arguments_do_not_break_a_stream(server: FixedServer, client: Anthropic, arguments: str) -> None:
    server.outcome = [responses.build_function_call("add", arguments, "c")]
    folded = stream_message(client)
    assert folded["content"][0]["input"] == ({"_arguments": arguments} if arguments else {})


def test_a_stream_sends_text_incrementally(server: FixedServer, client: Anthropic) -> None:
    server.outcome = [responses.build_message("40"), responses.build_message(" + 2")]
    with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        assert list(stream.text_stream) == ["40", " + 2"]


def test_the_sdk_sends_back_the_same_conversation(server: FixedServer, client: Anthropic) -> None:
    server.outcome = OUTPUT
    with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        turn = stream.get_final_message().content
    results = [{"type": "tool_result", "tool_use_id": call, "content": "2"} for call in ("c1", "c2")]
    history = [USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    client.messages.create(model="m", max_tokens=9, messages=history)
    items = server.request["input"][1:-2]
    new = {"id", "status"}
    assert [{k: v for k, v in item.items() if k not in new} for item in items] == [
        {k: v for k, v in item.items() if k not in new} for item in OUTPUT
    ]


def test_the_sdk_raises_its_own_errors(server: FixedServer, client: Anthropic) -> None:
    server.outcome = ApiError(429, "Too soon.", code="model_rate_limited")
    with pytest.raises(RateLimitError, match=r"Too soon\.") as raised:
        client.messages.create(model="m", max_tokens=9, messages=[USER])
    assert raised.value.body["error"]["details"] == {"error_code": "model_rate_limited"}
    with pytest.raises(APIStatusError, match=r"Too soon\."):
        stream_message(client)


def test_a_tool_that_only_anthropic_runs_is_rejected(client: Anthropic) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(BadRequestError, match="web_search_20250305"):
        client.messages.create(model="m", max_tokens=9, messages=[USER], tools=[tool])


def test_the_sdk_counts_tokens(client: Anthropic) -> None:
    assert client.messages.count_tokens(model="m", messages=[USER]).input_tokens == 7
