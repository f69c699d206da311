"""The source text of an environment that the tests install."""

from __future__ import annotations

SUMS = """
import asyncio, random
from pathlib import Path
from typing import Literal
from pydantic import SecretStr
from gymsdk import Claims, Config, Message, Reset, State, Task, Verdict, hookimpl

class Settings(Config):
    digits: int = 3
    pause: float = 0.0
    breaks: list[int] = []
    sulks: list[int] = []
    notes: str = ""
    hangs: bool = False
    key: SecretStr = SecretStr("none")

class Sum(Task):
    answer: int

class Memory(State):
    notes: str = ""

class Graded(Verdict):
    extracted_answer: str | None = None
    right: bool = False
    junk: object = None

@hookimpl
def tasks(split: Literal["train", "test"], seed, config: Settings):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**config.digits), rng.randrange(100, 1000)
        yield Sum.ask(f"What is {one} + {other}?", answer=one + other, number=one)

@hookimpl
async def reset(config: Settings):
    if config.notes:
        with Path(config.notes).open("a") as file:
            file.write("opened\\n")
    return Reset(state=Memory(notes=config.notes))

@hookimpl
async def verify(task: Sum, transcript, config: Settings):
    await asyncio.sleep(config.pause)
    while config.hangs:
        pass
    if task.answer in config.breaks:
        raise ValueError(f"cannot add to {task.answer}")
    text = transcript.reply.strip()
    junk = object() if task.answer in config.sulks else None
    right = text == str(task.answer)
    return Graded(reward=float(right), extracted_answer=text or None, right=right, junk=junk)

@hookimpl
async def close(state: Memory):
    if state.notes:
        with Path(state.notes).open("a") as file:
            file.write("closed\\n")

@hookimpl
def solve(task: Sum):
    return Message(content=str(task.answer))
"""
"""An environment of additions; settings make tasks raise, return a verdict that is not JSON, or hang."""

PLAIN = """
import asyncio, contextlib, os, sys, threading, time
from pathlib import Path
from typing import Annotated, Any, Literal
from pydantic import Field
from gymsdk import Claims, Config, Message, Model, Reset, State, Step, Task, ToolCall, Verdict, hookimpl, offload

@hookimpl
def tasks(split: Literal["train"]):
    for number in range(12):
        yield Task.ask(f"Say {number}.")

@hookimpl
def verify():
    return Verdict(reward=1.0)

@hookimpl
def solve():
    return Message(content="yes")
"""
"""An environment that is satisfied with every reply. Definitions that a test appends replace those of the same name."""
