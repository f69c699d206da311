"""Fails semantic.code_execution: the tool `run_python` executes its argument."""

import random
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Compute {one} + {two} with run_python, and reply the number.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=str(task.total))


def run_python(code: str) -> str:
    """Run a program in Python.

    Args:
        code: The program; it stores its result in `answer`.
    """
    names = {}
    try:
        exec(code, names)
    except Exception as error:  # noqa: BLE001  # so such a tool goes on
        return repr(error)
    return str(names.get("answer"))


@hookimpl
def tools():
    return [run_python]


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.total)))
