"""Environments whose `lifespan` starts a server that all episodes share, as a client of MCP does."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymsdk import ToolCall
from gymsdk.checks.run import CHECKS, CheckRun

SESSION = """
import json, os, subprocess, sys
from contextlib import asynccontextmanager

SERVER = "import sys\\nfor line in sys.stdin:\\n    print(line.strip(), flush=True)\\n"
STARTS = 'PLACE'


class Session:
    '''Writes one message a line, and is closed for good by an error, as the streams of MCP are.'''

    def __init__(self, process):
        self.process = process
        self.closed = False
        self.lock = asyncio.Lock()

    async def call(self, name, arguments):
        if self.closed:
            raise ConnectionError("the session is closed")
        async with self.lock:
            try:
                line = json.dumps([name, arguments], ensure_ascii=False).encode() + b"\\n"
            except UnicodeEncodeError:
                self.closed = True
                raise
            self.process.stdin.write(line)
            await self.process.stdin.drain()
            return json.loads(await self.process.stdout.readline())[1]


@asynccontextmanager
async def connect():
    with open(STARTS, "a") as file:
        file.write("x")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**24
    )
    try:
        yield Session(process)
    finally:
        process.stdin.close()
        await process.wait()


@hookimpl
def lifespan():
    return connect()

TOOL = {
    "type": "function", "name": "echo", "description": "Echo a text.", "strict": False,
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


@hookimpl
def tasks(split: Literal["train", "test"], seed: int):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("abcdefgh", k=9))
        yield Task(responses_create_params={"input": f"Write {word} backwards.", "tools": [TOOL]}, word=word[::-1])


@hookimpl
async def step(action, shared: Any):
    if isinstance(action, Message):
        return Step(done=True)
    try:
        arguments = json.loads(action.arguments)
    except (ValueError, RecursionError):
        return Step(output="invalid arguments")
    if not isinstance(arguments, dict) or len(action.arguments) > 10_000:
        return Step(output="invalid arguments")
    return Step(output=json.dumps(await shared.call(action.name, arguments)))


@hookimpl
async def verify(task, transcript):
    return Verdict(reward=float(transcript.reply == task.word))


@hookimpl
def solve(task):
    return Message(content=task.word)
"""
MOST_STARTS = 40
"""How often all checks together may start the server."""


@pytest.mark.parametrize(
    "arguments", ['{"text": "\\ud800"}', '{"text": "\ud800"}', '{"\\udc00": [1]}', '{"a": ["\\uD83D"]}']
)
async def test_a_surrogate_in_an_argument_does_not_close_a_shared_session(environment, tmp_path, arguments):
    source = "import random\n" + SESSION.replace("PLACE", str(tmp_path / "starts"))
    async with environment(source) as loaded:
        episode = await loaded.reset(next(iter(loaded.tasks("train"))))
        refused = await loaded.step(episode, ToolCall(name="echo", arguments=arguments))
        assert "unpaired surrogate" in refused.output
        pair = await loaded.step(episode, ToolCall(name="echo", arguments='{"text": "\\ud83d\\ude00"}'))
        assert "text" in pair.output
        await loaded.close(episode)


@pytest.mark.slow
async def test_all_checks_start_a_shared_server_seldom_and_pass(subject, tmp_path: Path):
    report = await CheckRun(subject(SESSION.replace("PLACE", str(tmp_path / "starts")))).report(CHECKS)
    assert [(result.id, result.findings) for result in report.results if result.status == "failed"] == []
    assert (tmp_path / "starts").stat().st_size <= MOST_STARTS
