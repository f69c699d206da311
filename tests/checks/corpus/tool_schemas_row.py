"""Fails runtime.tool_schemas: the tool of its rows has a type that JSON Schema does not define."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl

CALCULATOR = {
    "type": "function",
    "name": "reckon",
    "description": "Reckon.",
    "parameters": {"type": "object", "properties": {"sum": {"type": "text"}}, "required": ["sum"]},
}


class Sum(Task):
    answer: int


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        prompt = [{"role": "user", "content": f"What is {one} + {other}?"}]
        yield Sum(responses_create_params={"input": prompt, "tools": [CALCULATOR]}, answer=one + other)


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))


@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
