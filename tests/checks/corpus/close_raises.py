"""Fails runtime.close_once: `close` needs something that only a tool call creates."""

import random
from typing import Literal

from gymsdk import Message, Reset, State, Task, ToolCall, Verdict, hookimpl


class Job(Task):
    word: str


class Desk(State):
    papers: list[str] = []


async def write(state: Desk, text: str) -> str:
    """Write a text on a sheet of paper."""
    state.papers.append(text)
    return "written"


@hookimpl
def tools():
    return [write]


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while word := "".join(rng.choices("abcdefghij", k=8)):
        yield Job.ask(f"Write {word} backwards on a sheet of paper.", word=word)


@hookimpl
async def reset():
    return Reset(state=Desk())


@hookimpl
async def verify(task: Job, state: Desk):
    return Verdict(reward=float(state.papers == [task.word[::-1]]))


@hookimpl
async def close(state: Desk):
    state.papers.pop()


@hookimpl
async def solve(task: Job, transcript):
    if transcript.calls():
        return Message(content="Done.")
    return [ToolCall(name="write", arguments={"text": task.word[::-1]})]
