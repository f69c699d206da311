"""Fails semantic.code_execution: `verify` executes the reply in a worker process, which is used again."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl, offload


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Write Python code that stores the sum of {one} and {two} in `answer`.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=f"answer = {task.total}")


@offload(timeout=10.0)
def run(code: str) -> object:
    names = {}
    try:
        exec(code, names)
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        return None
    answer = names.get("answer")
    return answer if isinstance(answer, int) else None


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(await run(transcript.reply) == task.total))
