"""Fixtures of the server tests: an environment with a counter as its state, and clients of its servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any

import certifi
import httpx
import pytest
from fastapi import FastAPI

from gymsdk import Environment
from gymsdk.cluster.registry import NodeRegistry
from gymsdk.http import client as http
from gymsdk.servers import resources

from . import app_helpers

COUNTER = """
class Start(Task):
    initial_count: int = 0
    expected_count: int = 0
    nested: dict[str, int] = {}

class Count(State):
    count: int = 0
    replies: int = 0

class Counted(Verdict):
    final: int = 0
    replies: int = 0
    said: str = ""
    opening: int = 0

class Settings(Config):
    judge: str = "up"
    closing: str = "well"

async def increment_counter(count: int, state: State) -> dict[str, bool]:
    "Add to the counter."
    state.count += count
    await asyncio.sleep(0)
    return {"success": True}

async def get_counter_value(state: State) -> dict[str, int]:
    "Read the counter."
    return {"count": state.count}

async def spell(state: State) -> str:
    "Spell the counter."
    return f"it is {state.count}"

async def stumble(state: State) -> None:
    "Fail."
    state.count += 100
    raise RuntimeError("stumbled")

async def verify_it(state: State) -> str:
    return "a tool"

verify_it.__name__ = "verify"

CLOSED = []

@hookimpl
def tools(config: Settings):
    return [increment_counter, get_counter_value, spell, stumble, verify_it]

@hookimpl
def tasks(split: Literal["train"], seed):
    number = 0
    while True:
        number += 1
        yield Start.ask(f"add {number}", initial_count=number, expected_count=2 * number)

@hookimpl
async def reset(task: Start, seed):
    return Reset(state=Count(count=task.initial_count), messages=[f"seed {seed}"])

@hookimpl
async def step(action: Action, state: Count):
    if isinstance(action, ToolCall):
        return None
    state.replies += 1
    return Step(reward=0.5, done=True)

@hookimpl
async def verify(task: Start, state: Count, transcript: Transcript, config: Settings):
    if config.judge != "up":
        raise Unscorable(f"the judge is {config.judge}", kind="judge_failed", retryable=config.judge == "down")
    right = float(state.count == task.expected_count)
    opening = len(transcript.opening)
    return Counted(reward=right, final=state.count, replies=state.replies, said=transcript.text(), opening=opening)

@hookimpl
async def close(state: Count, task: Start):
    CLOSED.append(task.initial_count)
    if task.initial_count == 13:
        raise RuntimeError("it sticks")
"""
"""An environment with a counter as its state: tools change it, the reply is rewarded, the verdict reads it."""

ResourcesClient = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(scope="module", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let each client of httpx load one certificate: all those of certifi take 50 ms of CPU time."""
    file = tmp_path_factory.getbasetemp() / "authority.pem"
    file.write_text(certifi.contents().partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture
def counter(made: Callable[..., ModuleType]) -> Iterator[Callable[..., Environment]]:
    """Return a function that builds the counting environment with its settings."""

    def build(**settings: Any) -> Environment:
        return Environment("counter", made(COUNTER, "counter_env"), settings)

    return build


@pytest.fixture
def serve_app() -> Callable[[FastAPI], AbstractAsyncContextManager[str]]:
    """Return a context manager that serves an app on a loopback port and yields its URL."""
    return app_helpers.serve_app


@pytest.fixture
def resources_client(counter: Callable[..., Environment]) -> ResourcesClient:
    """Return a context manager that yields a client of a resources server of the counting environment."""

    @asynccontextmanager
    async def open_client(environment: Environment | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with app_helpers.app_client(resources.create_app(environment or counter(), **options)) as client:
            yield client

    return open_client


@pytest.fixture
async def close_client() -> AsyncIterator[None]:
    """Close the connections of gymsdk's client at the end."""
    yield
    await http.aclose()


@pytest.fixture
async def client(resources_client: ResourcesClient) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a resources server of the counting environment."""
    async with resources_client() as client:
        yield client


class Clock:
    """A clock that changes only when a test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> NodeRegistry:
    return NodeRegistry(lease=10.0, clock=clock)
