"""Measure the CPU time of the model proxy per call, for each pair of inbound API and upstream API.

usage: proxy.py [--calls N] [--concurrency C]

The policy endpoint, each proxy, and the client run in separate processes. The script also measures responses of 65,536
tokens with their token ids and log-probabilities, compared with the CPU time to parse the upstream response once and to
serialize the proxy's response once. The exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gymsdk import model, responses, testing
from gymsdk.edge.addresses import bind_socket
from gymsdk.edge.listener import Listener
from gymsdk.responses import build_usage
from gymsdk.servers import model as server
from gymsdk.types import Episode, Item

TICKS = os.sysconf("SC_CLK_TCK")
REPETITIONS = 3
"""Repetitions of each load. The lowest CPU time counts, because other processes on this machine can only add to it."""

LONG = 65_536
LONG_CALLS = 12
NAME = "policy"
UPSTREAMS = {"chat": ("endpoint", "chat"), "responses": ("endpoint", "responses"), "vllm": ("vllm", "chat")}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CALL = {"name": "add", "arguments": '{"a": 40, "b": 2}'}
WORDS = "You add numbers with the tool you have, one sum at a time, and then say the total. " * 4

RESPONSES: Item = {
    "input": [
        {"role": "system", "content": WORDS},
        {"role": "user", "content": "What is 40 + 2 + 1?"},
        {"type": "function_call", "call_id": "c1", **CALL},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ],
    "tools": [{"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": False}],
}
CHAT: Item = {
    "messages": [
        {"role": "system", "content": WORDS},
        {"role": "user", "content": "What is 40 + 2 + 1?"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}],
}
MESSAGES: Item = {
    "max_tokens": 10**9,
    "system": WORDS,
    "messages": [
        {"role": "user", "content": "What is 40 + 2 + 1?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 40, "b": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "42"}]},
    ],
    "tools": [{"name": "add", "description": "Add.", "input_schema": ADD}],
}
REQUESTS = {"responses": RESPONSES, "chat/completions": CHAT, "messages": MESSAGES}
"""The same turn of the same conversation, as a request body of each inbound API."""

LIMIT, STREAMED_LIMIT = 1.0, 1.2
"""Maximum CPU time of the proxy per call in milliseconds, without and with streaming."""

TOKEN_OPTIONS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
"""Request options that make an engine return the token ids and log-probabilities of its output."""

LONG_RESPONSES: tuple[tuple[str, str, Item], ...] = (
    ("bundled", "responses", {}),
    ("bundled", "vllm", {}),
    ("lettered", "vllm", TOKEN_OPTIONS),
)
"""Each long response: its entry in `OUTPUTS`, its entry in `UPSTREAMS`, and the request options for its tokens."""

LONG_LIMIT = 2.5
"""Maximum ratio of the proxy's CPU time for a long response, with socket I/O, to that of one parse and one dump."""

PATHS = {"chat": "chat/completions", "responses": "responses"}
HI = [{"role": "user", "content": "hi"}]
TINY: dict[str, Item] = {
    "responses": {"input": HI},
    "chat/completions": {"messages": HI},
    "messages": {"max_tokens": 10**9, "messages": HI},
}


@dataclass(frozen=True)
class Figure:
    """One measurement and its limit."""

    name: str
    value: float
    unit: str
    limit: float

    @property
    def within_limit(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit

    def __str__(self) -> str:
        mark = "" if self.within_limit else "  EXCEEDED"
        return f"{self.name:<72} {self.value:7.3g} {self.unit} (limit {self.limit:g}){mark}"


@dataclass(frozen=True)
class Child:
    """A server process and its URL."""

    process: subprocess.Popen[str]
    url: str

    def cpu(self) -> float:
        """Return the CPU time, user and system, that the process has used, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


class FixedPolicy:
    """A policy that returns the same *output* for each request."""

    name = NAME

    def __init__(self, *output: Item) -> None:
        self._output = output

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002 - the protocol requires it
        """Respond to *request*."""
        output = [dict(item) for item in self._output]
        return responses.build_response(output, model=NAME, usage=build_usage(300, 40), request=request)


def main() -> None:
    """Measure; with `--serve`, serve a policy or a proxy instead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(*arguments.serve))
        return
    within_limit = True
    for figure in measure(arguments.calls, arguments.concurrency):
        print(figure, flush=True)
        within_limit = within_limit and figure.within_limit
    sys.exit(not within_limit)


async def serve(kind: str, *arguments: Any) -> None:
    """Serve a proxy, or a policy with the output that *kind* names; print the URL and run until killed."""
    if kind != "proxy":
        async with testing.serve(testing.build_app(FixedPolicy(*OUTPUTS[kind]()), name=NAME)) as url:
            print(url, flush=True)
            await asyncio.Event().wait()
    provider, api, base_url = arguments
    upstream_model = model(f"{provider}/{NAME}", base_url=base_url, api=api)
    with bind_socket("127.0.0.1") as sock:
        listener = Listener(server.create_app(upstream_model), sock, grace=1)
        print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        await listener.run(asyncio.Event(), asyncio.Event())


def short_output() -> list[Item]:
    """Return a typical agent response: reasoning, a message and a tool call."""
    call = responses.build_function_call("add", '{"a": 42, "b": 1}', "call_1")
    return [responses.build_reasoning("The sum is 42, one is left."), responses.build_message("I add 1."), call]


def bundled_output() -> list[Item]:
    """Return a long response that includes its token ids and log-probabilities."""
    rng = random.Random(7)
    ids = [rng.randrange(151_936) for _ in range(LONG)]
    tokens = dict(zip(responses.TOKEN_FIELDS, (ids[:2000], ids, [-rng.expovariate(3) for _ in ids]), strict=True))
    return [responses.build_message("word " * LONG) | tokens]


def one_byte_output() -> list[Item]:
    """Return a long response of one-byte tokens, which the engine reports in the format of vLLM."""
    return [responses.build_message("a" * (LONG - 1))]


OUTPUTS: dict[str, Callable[[], list[Item]]] = {
    "short": short_output,
    "bundled": bundled_output,
    "lettered": one_byte_output,
}


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    """Run this script in a child process that serves what *arguments* name."""
    command = [sys.executable, __file__, "--serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Child(process, process.stdout.readline().strip())
        finally:
            process.terminate()


def measure(calls: int, concurrency: int) -> Iterator[Figure]:
    """Yield the CPU time of short responses for each pair of APIs, then the CPU time of long responses."""
    with child("short") as engine:
        for upstream, (provider, api) in UPSTREAMS.items():
            with child("proxy", provider, api, engine.url) as proxy:
                yield from _measure_short(proxy, upstream, calls, concurrency)
    for output, upstream, options in LONG_RESPONSES:
        with child(output) as engine, child("proxy", *UPSTREAMS[upstream], engine.url) as proxy:
            yield from _measure_long(engine, proxy, output, upstream, options)


def _measure_short(proxy: Child, upstream: str, calls: int, concurrency: int) -> Iterator[Figure]:
    for path, request in REQUESTS.items():
        for streamed, limit in ((False, LIMIT), (True, STREAMED_LIMIT)):
            body = orjson.dumps(request | {"model": NAME, "stream": streamed})
            url = f"{proxy.url}/v1/{path}"
            asyncio.run(load(url, body, concurrency, concurrency))
            cpu = min(_measure_cpu(proxy, url, body, calls, concurrency) for _ in range(REPETITIONS))
            name = f"{path} to {upstream}{', streamed' if streamed else ''}"
            yield Figure(name, 1e3 * cpu / calls, "ms", limit)


def _measure_long(engine: Child, proxy: Child, output: str, upstream: str, options: Item) -> Iterator[Figure]:
    """Yield the proxy's CPU time for a long response, relative to one parse of its input and one dump of its output."""
    upstream_path = PATHS[UPSTREAMS[upstream][1]]
    received = asyncio.run(
        load(f"{engine.url}/{upstream_path}", orjson.dumps({**TINY[upstream_path], **options, "model": NAME}), 1, 1)
    )
    for path in REQUESTS:
        body = orjson.dumps({**TINY[path], **options, "model": NAME})
        url = f"{proxy.url}/v1/{path}"
        sent = asyncio.run(load(url, body, 2, 1))
        assert all(key.encode() in sent for key in responses.TOKEN_FIELDS[1:]), sent[:300]
        cpu = min(_measure_cpu(proxy, url, body, LONG_CALLS, 1) for _ in range(REPETITIONS)) / LONG_CALLS
        baseline = _measure_parse_and_dump(received, sent)
        sizes = f"{len(received) / 1e6:.1f} MB in, {len(sent) / 1e6:.1f} out"
        name = f"{output} response: {path} to {upstream} ({sizes})"
        yield Figure(name, cpu / baseline, f"x of {1e3 * baseline:.1f} ms", LONG_LIMIT)


def _measure_cpu(proxy: Child, url: str, body: bytes, calls: int, concurrency: int) -> float:
    before = proxy.cpu()
    asyncio.run(load(url, body, calls, concurrency))
    return proxy.cpu() - before


def _measure_parse_and_dump(received: bytes, sent: bytes) -> float:
    """Return the CPU time in seconds to parse *received* once and serialize *sent* once; the lowest of ten runs."""
    body, times = orjson.loads(sent), []
    for _ in range(10):
        began = time.process_time()
        orjson.loads(received)
        orjson.dumps(body)
        times.append(time.process_time() - began)
    return min(times)


async def load(url: str, body: bytes, calls: int, concurrency: int) -> bytes:
    """Post *body* *calls* times, *concurrency* at a time, and return the last response; each status must be 200."""
    left, last = calls, b""
    headers = {"content-type": "application/json"}

    async def send(session: aiohttp.ClientSession) -> None:
        nonlocal left, last
        while left > 0:
            left -= 1
            async with session.post(url, data=body, headers=headers) as answer:
                last = await answer.read()
                assert answer.status == 200, last[:500]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(send(session))
    return last


if __name__ == "__main__":
    main()
