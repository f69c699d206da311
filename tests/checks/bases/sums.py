"""Additions with a correct verifier. A case names again what differs."""

import asyncio
import random
from typing import Annotated, Any, Literal

from pydantic import Field

from gymsdk import Claims, Config, Message, Reset, State, Step, Task, ToolCall, Transcript, Verdict, hookimpl, offload

SPLIT, PROMPT, REPLY = "{split}:{seed}", "What is {one} + {other}?", "{total}"


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(SPLIT.format(split=split, seed=seed))
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(PROMPT.format(one=one, other=other, total=one + other), total=one + other)


@hookimpl
def solve(task: Sum):
    return Message(content=REPLY.format(total=task.total))


def grade(task: Sum, transcript: Transcript) -> Verdict:
    return Verdict(reward=float(transcript.reply.strip() == REPLY.format(total=task.total)))


@hookimpl
def verify(task: Sum, transcript):
    return grade(task, transcript)
