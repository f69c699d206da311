"""What a call costs the model proxy: the CPU of its process by the API before it and the API behind it.

usage: proxy.py [--calls N] [--concurrency C]

The policy endpoint behind it, each proxy, and the client are processes of their own. Then answers of 65,536 tokens with
their ids and log-probabilities, against the CPU of one parse of what came and one dump of what went. Exits with 1 where
a limit is exceeded.
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
from gymsdk.servers import model as server
from gymsdk.servers.listener import Listener, bind_socket
from gymsdk.types import Episode, Item

TICKS = os.sysconf("SC_CLK_TCK")
TIMES = 3
"""Loads of each kind, the least of which counts: whatever else runs here only adds."""

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
ASKS = {"responses": RESPONSES, "chat/completions": CHAT, "messages": MESSAGES}
"""The same turn of the same conversation, in each API."""

LIMIT, STREAMED_LIMIT = 1.0, 1.2
"""Milliseconds of CPU that a call may cost the proxy, whole and streamed."""

TOLD = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
"""What has an engine tell the tokens of what it says."""

LONGS: tuple[tuple[str, str, Item], ...] = (
    ("bundled", "responses", {}),
    ("bundled", "vllm", {}),
    ("lettered", "vllm", TOLD),
)
"""What is said at length, which API it comes from, and what asks for its tokens."""

LONG_LIMIT = 2.5
"""How many times the CPU of one parse and one dump a long answer may cost the proxy, sockets included."""

PATHS = {"chat": "chat/completions", "responses": "responses"}
HI = [{"role": "user", "content": "hi"}]
TINY: dict[str, Item] = {
    "responses": {"input": HI},
    "chat/completions": {"messages": HI},
    "messages": {"max_tokens": 10**9, "messages": HI},
}


@dataclass(frozen=True)
class Figure:
    """One measurement, with the most it may be."""

    name: str
    value: float
    unit: str
    limit: float

    @property
    def kept(self) -> bool:
        """Whether it is within its limit."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.name:<72} {self.value:7.3g} {self.unit} (limit {self.limit:g}){'' if self.kept else '  EXCEEDED'}"
        )


@dataclass(frozen=True)
class Child:
    """A process that serves, and where."""

    process: subprocess.Popen[str]
    url: str

    def cpu(self) -> float:
        """Give the seconds of CPU, user's and system's, that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


class Told:
    """A policy that says the same *output* every time."""

    name = NAME

    def __init__(self, *output: Item) -> None:
        self._output = output

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002 - the protocol's
        """Answer *request*."""
        output = [dict(each) for each in self._output]
        return responses.build_response(output, model=NAME, usage=responses.build_usage(300, 40), request=request)


def main() -> None:
    """Serve what a word names, or measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(served(*asked.serve))
        return
    kept = True
    for figure in measured(asked.calls, asked.concurrency):
        print(figure, flush=True)
        kept = kept and figure.kept
    sys.exit(not kept)


async def served(what: str, *words: Any) -> None:
    """Serve a policy that says *what*, or a proxy before one; tell the URL, and last until killed."""
    if what != "proxy":
        async with testing.serve(testing.build_app(Told(*SAYINGS[what]()), name=NAME)) as url:
            print(url, flush=True)
            await asyncio.Event().wait()
    provider, api, base = words
    behind = model(f"{provider}/{NAME}", base_url=base, api=api)
    with bind_socket("127.0.0.1") as at:
        listener = Listener(server.create_app(behind), at, grace=1)
        print(f"http://127.0.0.1:{at.getsockname()[1]}", flush=True)
        await listener.run(asyncio.Event(), asyncio.Event())


def short() -> list[Item]:
    """Give an answer as agents mostly get it: a thought, a text, a call."""
    call = responses.build_function_call("add", '{"a": 42, "b": 1}', "call_1")
    return [responses.build_reasoning("The sum is 42, one is left."), responses.build_message("I add 1."), call]


def bundled() -> list[Item]:
    """Give a long answer with its tokens."""
    rng = random.Random(7)
    ids = [rng.randrange(151_936) for _ in range(LONG)]
    tokens = dict(zip(responses.TOKEN_FIELDS, (ids[:2000], ids, [-rng.expovariate(3) for _ in ids]), strict=True))
    return [responses.build_message("word " * LONG) | tokens]


def lettered() -> list[Item]:
    """Give a long answer whose tokens, a byte each, the engine tells as vLLM does."""
    return [responses.build_message("a" * (LONG - 1))]


SAYINGS: dict[str, Callable[[], list[Item]]] = {"short": short, "bundled": bundled, "lettered": lettered}


@contextmanager
def child(*words: str) -> Iterator[Child]:
    """A process of this script that serves what *words* say."""
    command = [sys.executable, __file__, "--serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Child(process, process.stdout.readline().strip())
        finally:
            process.terminate()


def measured(calls: int, concurrency: int) -> Iterator[Figure]:
    """Give the cost of the short answers by both APIs, then that of the long ones."""
    with child("short") as engine:
        for upstream, (provider, api) in UPSTREAMS.items():
            with child("proxy", provider, api, engine.url) as proxy:
                yield from _short(proxy, upstream, calls, concurrency)
    for saying, upstream, asks in LONGS:
        with child(saying) as engine, child("proxy", *UPSTREAMS[upstream], engine.url) as proxy:
            yield from _long(engine, proxy, saying, upstream, asks)


def _short(proxy: Child, upstream: str, calls: int, concurrency: int) -> Iterator[Figure]:
    for path, asks in ASKS.items():
        for streamed, limit in ((False, LIMIT), (True, STREAMED_LIMIT)):
            body = orjson.dumps(asks | {"model": NAME, "stream": streamed})
            url = f"{proxy.url}/v1/{path}"
            asyncio.run(load(url, body, concurrency, concurrency))
            spent = min(_spent(proxy, url, body, calls, concurrency) for _ in range(TIMES))
            name = f"{path} before {upstream}{', streamed' if streamed else ''}"
            yield Figure(name, 1e3 * spent / calls, "ms", limit)


def _long(engine: Child, proxy: Child, saying: str, upstream: str, asks: Item) -> Iterator[Figure]:
    """Give what a long answer costs the proxy, against one parse of the engine's answer and one dump of its own."""
    behind = PATHS[UPSTREAMS[upstream][1]]
    came = asyncio.run(load(f"{engine.url}/{behind}", orjson.dumps({**TINY[behind], **asks, "model": NAME}), 1, 1))
    for path in ASKS:
        body = orjson.dumps({**TINY[path], **asks, "model": NAME})
        url = f"{proxy.url}/v1/{path}"
        went = asyncio.run(load(url, body, 2, 1))
        assert all(key.encode() in went for key in responses.TOKEN_FIELDS[1:]), went[:300]
        spent = min(_spent(proxy, url, body, LONG_CALLS, 1) for _ in range(TIMES)) / LONG_CALLS
        least = _parsed_and_dumped(came, went)
        sizes = f"{len(came) / 1e6:.1f} MB in, {len(went) / 1e6:.1f} out"
        name = f"{saying} answer: {path} before {upstream} ({sizes})"
        yield Figure(name, spent / least, f"x of {1e3 * least:.1f} ms", LONG_LIMIT)


def _spent(proxy: Child, url: str, body: bytes, calls: int, concurrency: int) -> float:
    before = proxy.cpu()
    asyncio.run(load(url, body, calls, concurrency))
    return proxy.cpu() - before


def _parsed_and_dumped(came: bytes, went: bytes) -> float:
    """Give the seconds of CPU that one parse of what *came* and one dump of what *went* take, the least of some."""
    said, taken = orjson.loads(went), []
    for _ in range(10):
        began = time.process_time()
        orjson.loads(came)
        orjson.dumps(said)
        taken.append(time.process_time() - began)
    return min(taken)


async def load(url: str, body: bytes, calls: int, concurrency: int) -> bytes:
    """Post *body* so many times, *concurrency* at a time, and give the last answer; each must be sound."""
    left, last = calls, b""
    headers = {"content-type": "application/json"}

    async def asking(session: aiohttp.ClientSession) -> None:
        nonlocal left, last
        while left > 0:
            left -= 1
            async with session.post(url, data=body, headers=headers) as answer:
                last = await answer.read()
                assert answer.status == 200, last[:500]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(asking(session))
    return last


if __name__ == "__main__":
    main()
