"""Shared fixtures of the Gymnasium tests: an environment that uses every hook, and Gymnasium's registry."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from gymsdk import Environment
from gymsdk.gym.env import Env
from gymsdk.gym.registration import register

HOST = """
import threading, time
from contextlib import asynccontextmanager
from pydantic import Field

class Settings(Config):
    goal: int = 3
    breaks: str = ""
    environment: str = "a name that clashes"
    judge: Model | None = None

class Count(Task):
    goal: int = 3

class Memory(State):
    count: int = 0

log, gate, inside = [], threading.Event(), threading.Semaphore(0)

@hookimpl
@asynccontextmanager
async def lifespan(config: Settings):
    if config.breaks == "lifespan":
        raise OSError("no index")
    log.append("entered")
    yield "index"
    log.append("left")

@hookimpl
def tasks(split: Literal["train", "test"], seed):
    for number in range(100):
        yield Count.ask(f"Count to {split} {seed} {number}. 你好 👩‍💻", goal=3)

@hookimpl
def reset(task: Count, seed, config: Settings, shared):
    assert shared == "index"
    if config.breaks == "reset":
        raise RuntimeError("cannot open")
    if config.breaks == "hanging":
        inside.release()
        gate.wait(60)
    log.append("opened")
    return Reset(state=Memory(), messages=[f"Episode {seed}."])

def add(state: Memory, by: int):
    "Add to the count."
    state.count += by
    return {"count": state.count}

def hang():
    "Wait."
    inside.release()
    gate.wait(60)
    return "woken"

async def doze():
    "Wait, on the loop."
    inside.release()
    await asyncio.sleep(60)

@hookimpl
def tools():
    return [add, hang, doze]

@hookimpl
async def verify(state: Memory, config: Settings):
    if config.breaks == "verify":
        raise Unscorable("the judge is away", kind="judge_failed")
    return Verdict(reward=float(state.count == 3), components={"count": float(state.count == 3)})

@hookimpl
async def close(state: Memory):
    log.append("closed")
"""
"""Source of an environment that asks the policy to count to three. It uses every hook and logs what it opens and
closes.
"""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.fixture
def host(made: Callable[..., ModuleType]) -> ModuleType:
    return made(HOST, "host")


@pytest.fixture
def env(host: ModuleType, request: pytest.FixtureRequest) -> Callable[..., Env]:
    """Return a function that builds an `Env` of the counting environment, closed after the test."""

    def build(*, settings: dict[str, Any] | None = None, **given: Any) -> Env:
        env = Env(Environment("host", host, settings), **given)
        request.addfinalizer(lambda: (host.gate.set(), env.close()))
        return env

    return build


@pytest.fixture
def registered() -> list[str]:
    return register()
