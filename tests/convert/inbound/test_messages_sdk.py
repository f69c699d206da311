"""Anthropic's SDK reads the answers of the Messages API, streamed or not."""

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


class Served(ThreadingHTTPServer):
    """A server whose model says *said*, and which keeps the last request and the last message."""

    said: list[Item] | ApiError
    asked: Item
    message: Item


class Speaking(BaseHTTPRequestHandler):
    server: Served
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self.server.asked = MESSAGES_API.parse_request(body)
        except InvalidRequest as error:
            self.send(400, dump_json(MESSAGES_API.build_error(ApiError(400, str(error)))))
            return
        if self.path.endswith("/count_tokens"):
            self.send(200, dump_json(format_token_count(7)))
        elif isinstance(self.server.said, ApiError):
            self.fail(self.server.said, streamed=bool(body.get("stream")))
        else:
            self.tell(self.server.said, body)

    def tell(self, said: list[Item], body: Item) -> None:
        answer = MESSAGES_API.build_answer(
            responses.build_response(said, model="m", usage=responses.build_usage(9, 4, cached_tokens=6)), body
        )
        self.server.message = answer
        if body.get("stream"):
            self.send(
                200, MESSAGES_API.heartbeat + b"".join(MESSAGES_API.stream_events(answer, body)), "text/event-stream"
            )
        else:
            self.send(200, dump_json(answer))

    def fail(self, trouble: ApiError, *, streamed: bool) -> None:
        if streamed:
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
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(("127.0.0.1", 0), Speaking) as served:
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever, args=[0.01])
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x", max_retries=0) as client:
        yield client


def streamed(client: Anthropic) -> Item:
    with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        return without_parsing(stream.get_final_message().to_dict())


def without_parsing(message: Item) -> Item:
    """What it was told: the SDK puts in what it parses, and some of its versions nulls where nothing was said."""
    told = [{key: value for key, value in block.items() if value is not None} for block in message["content"]]
    return message | {"content": [{key: block[key] for key in block if key != "parsed_output"} for block in told]}


def test_the_sdk_reads_every_block(server: Served, client: Anthropic) -> None:
    server.said = OUTPUT
    message = client.messages.create(model="m", max_tokens=9, messages=[USER])
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "thinking", "redacted_thinking", "text", "tool_use", "tool_use"]
    assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("tool_use", 6)


def test_the_sdk_folds_a_stream_into_the_same_message(server: Served, client: Anthropic) -> None:
    server.said = OUTPUT
    folded = streamed(client)
    assert folded == server.message


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
def test_any_answer_is_the_same_streamed(server: Served, client: Anthropic, output: list[Item]) -> None:
    server.said = output
    folded = streamed(client)
    assert folded == server.message


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}'])
def test_odd_arguments_do_not_break_a_stream(server: Served, client: Anthropic, arguments: str) -> None:
    server.said = [responses.build_function_call("add", arguments, "c")]
    folded = streamed(client)
    assert folded["content"][0]["input"] == ({"_arguments": arguments} if arguments else {})


def test_a_stream_tells_text_as_it_comes(server: Served, client: Anthropic) -> None:
    server.said = [responses.build_message("40"), responses.build_message(" + 2")]
    with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        assert list(stream.text_stream) == ["40", " + 2"]


def test_the_sdk_sends_back_the_same_conversation(server: Served, client: Anthropic) -> None:
    server.said = OUTPUT
    with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        turn = stream.get_final_message().content
    results = [{"type": "tool_result", "tool_use_id": call, "content": "2"} for call in ("c1", "c2")]
    history = [USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    client.messages.create(model="m", max_tokens=9, messages=history)
    said = server.asked["input"][1:-2]
    new = {"id", "status"}
    assert [{k: v for k, v in item.items() if k not in new} for item in said] == [
        {k: v for k, v in item.items() if k not in new} for item in OUTPUT
    ]


def test_the_sdk_raises_its_own_errors(server: Served, client: Anthropic) -> None:
    server.said = ApiError(429, "Too soon.", code="model_rate_limited")
    with pytest.raises(RateLimitError, match=r"Too soon\.") as raised:
        client.messages.create(model="m", max_tokens=9, messages=[USER])
    assert raised.value.body["error"]["details"] == {"error_code": "model_rate_limited"}


def test_a_failing_stream_raises_its_error(server: Served, client: Anthropic) -> None:
    server.said = ApiError(503, "It is down.")
    with (
        pytest.raises(APIStatusError, match=r"It is down\."),
        client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream,
    ):
        stream.get_final_message()


def test_a_tool_that_only_anthropic_runs_is_refused(client: Anthropic) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(BadRequestError, match="web_search_20250305"):
        client.messages.create(model="m", max_tokens=9, messages=[USER], tools=[tool])


def test_the_sdk_counts_tokens(client: Anthropic) -> None:
    assert client.messages.count_tokens(model="m", messages=[USER]).input_tokens == 7
