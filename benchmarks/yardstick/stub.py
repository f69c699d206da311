r"""Serve the stub model: an OpenAI-compatible server on a raw asyncio protocol, for about 30,000 requests per second.

usage: python stub.py [--port N]

The server does not parse JSON, except to stream a chat completion. The first segments of the path select what it does,
so the caller chooses with the base URL, as in `http://127.0.0.1:PORT/latency2000/v1`:

- `/latencyMS`: answer after MS milliseconds.
- `/turnsN`: call the tool in the first N turns, each with a text of 1.5 kB; without it, call the tool once.
- `/tokensN`: answer with a text of N tokens, their ids and their log-probabilities, and call no tool.

A request with `<<<ANS:x>>>` gets a worked solution that ends in `\boxed{x}`. A request that offers tools gets a tool
call until it contains enough tool outputs, and then a reply. No two texts are equal, so caches gain nothing.

`GET /stats` returns the largest number of requests that were pending at the same time; `GET /reset` sets it to zero.
`GET /watch/PID,...` makes the server record the CPU time of these processes at each request of a `/turnsN` path, N > 1,
and `GET /turns` returns the records as pairs of the number of tool outputs in the request and the CPU time in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import orjson
import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
from yardstick.processes import read_cpu

PATH = re.compile(rb"^(?:/latency(\d+))?(?:/turns(\d+))?(?:/tokens(\d+))?(/.*)$")
WORK = (
    "We are asked to find the value. Let $x$ denote the unknown quantity and note that $x^2 - 3x + 2 = 0$ has the "
    "roots $x = 1$ and $x = 2$, so that the sum is $3$. Next, substituting \\(y = \\frac{x}{2}\\) we obtain "
    "\\[ \\int_0^1 t^2\\,dt = \\frac{1}{3}. \\] Hence the ratio is about 0.333 and, multiplying by 12, we see 4. "
) * 4
TURN_TEXT = orjson.dumps((WORK * 2)[:1500])
SOLUTION = orjson.dumps(WORK[:1000] + " Therefore the final answer is $\\boxed{")[1:-1]
SOLUTION_END = orjson.dumps("}$.")[1:-1]
REPLY = b'"It is cold in San Francisco today, so take a coat."'
ARGUMENTS = orjson.dumps('{"city":"San Francisco"}')
RESPONSES_USAGE = (
    b'{"input_tokens":128,"input_tokens_details":{"cached_tokens":0},"output_tokens":256,'
    b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":384}'
)
CHAT_USAGE = b'{"prompt_tokens":128,"completion_tokens":256,"total_tokens":384}'
MODELS = (
    b'{"object":"list","data":[{"id":"stub","object":"model","created":0,"owned_by":"stub","max_model_len":262144}]}'
)
OUTPUT_MARKS = {b"/responses": b"function_call_output", b"/chat/completions": b'"tool_call_id"'}
"""The text that a request contains once for each tool output, by the end of the path."""

STREAMS = re.compile(rb'"stream": ?true')
EVENT = b"data: %s\n\n"
BACKLOG = 8192
_numbers = itertools.count(1)


@dataclass
class Stats:
    """What the server counts."""

    pending: int = 0
    peak_pending: int = 0
    watched: list[int] = field(default_factory=list)
    turns: list[tuple[int, float]] = field(default_factory=list)


STATS = Stats()


def build_solution(body: bytes) -> bytes:
    """Return a worked solution with the answer that the request asks for, as a JSON string."""
    start = body.rfind(b"<<<ANS:")
    answer = body[start + 7 : body.find(b">>>", start)] if start >= 0 else b"42"
    return b'"Attempt %d. %s%s%s"' % (next(_numbers), SOLUTION, answer, SOLUTION_END)


def build_response(body: bytes, outputs: int, turns: int, tokens: int) -> bytes:
    """Return a body of the Responses API for a request that contains *outputs* tool outputs."""
    number = next(_numbers)
    if b'"tools":[{' in body and outputs < turns:
        output = (
            b'{"id":"fc_%d","type":"function_call","call_id":"call_%d","name":"get_weather","arguments":%s,'
            b'"status":"completed"}'
        ) % (number, number, ARGUMENTS)
        if turns > 1:
            output = _build_message(number, TURN_TEXT) + b"," + output
    else:
        text = REPLY if outputs else build_solution(body)
        output = build_token_message(tokens) if tokens else _build_message(number, text)
    return (
        b'{"id":"resp_%d","object":"response","created_at":1700000000.0,"model":"stub","status":"completed","output":[%s],'
        b'"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"error":null,"incomplete_details":null,'
        b'"instructions":null,"metadata":{},"temperature":1.0,"top_p":1.0,"usage":%s}'
    ) % (number, output, RESPONSES_USAGE)


def _build_message(number: int, text: bytes) -> bytes:
    return (
        b'{"id":"msg_%d","type":"message","role":"assistant","status":"completed","content":'
        b'[{"type":"output_text","text":%s,"annotations":[]}]}'
    ) % (number, text)


@cache
def build_token_message(tokens: int) -> bytes:
    """Return a message of *tokens* tokens with their ids and log-probabilities, in the fields that NeMo Gym reads."""
    rng = random.Random(7)
    ids = [rng.randrange(151_936) for _ in range(tokens)]
    return orjson.dumps(
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "word " * tokens, "annotations": []}],
            "prompt_token_ids": ids[:128],
            "generation_token_ids": ids,
            "generation_log_probs": [-rng.expovariate(3) for _ in ids],
        }
    )


def build_chat_completion(body: bytes, outputs: int, turns: int) -> bytes:
    """Return a body of the Chat Completions API for a request that contains *outputs* tool outputs."""
    number = next(_numbers)
    if b'"tools"' in body and b'"parameters"' in body and outputs < turns:
        finish_reason = b"tool_calls"
        message = (
            b'{"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"call_%d","type":"function",'
            b'"function":{"name":"get_weather","arguments":%s}}]}'
        ) % (number, ARGUMENTS)
    else:
        finish_reason = b"stop"
        text = REPLY if outputs else build_solution(body)
        message = b'{"role":"assistant","content":%s,"refusal":null}' % text
    return (
        b'{"id":"chatcmpl-%d","object":"chat.completion","created":1700000000,"model":"stub","choices":[{"index":0,'
        b'"message":%s,"logprobs":null,"finish_reason":"%s"}],"usage":%s}'
    ) % (number, message, finish_reason, CHAT_USAGE)


def build_stream(completion: bytes) -> bytes:
    """Return the server-sent events of a response of the Chat Completions API: one with the message, and the usage."""
    body = orjson.loads(completion)
    [choice] = body.pop("choices")
    usage = body.pop("usage")
    delta, body["object"] = choice.pop("message"), "chat.completion.chunk"
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    chunks = (body | {"choices": [choice | {"delta": delta}]}, body | {"choices": [], "usage": usage})
    return b"".join(EVENT % orjson.dumps(chunk) for chunk in chunks) + EVENT % b"[DONE]"


def respond(path: bytes, body: bytes, turns: int, tokens: int) -> bytes:
    """Return the body of the response to one request."""
    for end, mark in OUTPUT_MARKS.items():
        if path.endswith(end):
            outputs = body.count(mark)
            if turns > 1 and STATS.watched:
                STATS.turns.append((outputs, sum(map(read_cpu, STATS.watched))))
            if end == b"/responses":
                return build_response(body, outputs, turns, tokens)
            completion = build_chat_completion(body, outputs, turns)
            return build_stream(completion) if STREAMS.search(body) else completion
    return control(path)


def control(path: bytes) -> bytes:
    """Return the list of models, or do what a route of the benchmarks asks for."""
    if path == b"/reset":
        STATS.peak_pending = 0
    if path == b"/stats":
        return orjson.dumps({"peak_pending": STATS.peak_pending})
    if path.startswith(b"/watch/"):
        STATS.watched, STATS.turns = [int(pid) for pid in path[7:].split(b",") if pid], []
    if path == b"/turns":
        return orjson.dumps(STATS.turns)
    return MODELS if path.endswith(b"/models") else b"{}"


class StubProtocol(asyncio.Protocol):
    """One connection: HTTP/1.1 with keep-alive and bodies with a content-length."""

    __slots__ = ("buffer", "transport")

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a TCP connection
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            path, body = self.buffer.split(b" ", 2)[1], self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            self.answer(path, body, closes=b"connection: close" in head)

    def answer(self, path: bytes, body: bytes, *, closes: bool) -> None:
        """Answer one request, after the latency that its path asks for."""
        found = PATH.match(path)
        assert found, path
        latency, turns, tokens, path = found.groups()
        STATS.pending += 1
        STATS.peak_pending = max(STATS.peak_pending, STATS.pending)
        response = respond(path, body, int(turns or not tokens), int(tokens or 0))
        if latency:
            asyncio.get_running_loop().call_later(int(latency) / 1000, self.send, response, closes)
        else:
            self.send(response, closes)

    def send(self, body: bytes, closes: bool) -> None:
        """Send a response."""
        STATS.pending -= 1
        if self.transport.is_closing():
            return
        media_type = b"text/event-stream" if body.startswith(b"data: ") else b"application/json"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (media_type, len(body))
        self.transport.write(head + body)
        if closes:
            self.transport.close()


async def serve(port: int) -> None:
    """Serve the stub until the process is terminated; print a line of JSON when it is ready."""
    server = await asyncio.get_running_loop().create_server(StubProtocol, "127.0.0.1", port, backlog=BACKLOG)
    print(orjson.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}).decode(), flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve the stub."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
