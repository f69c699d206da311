"""Fails semantic.code_execution: `verify` executes the reply in a forked process."""

import multiprocessing
import random
import warnings
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


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


def run(code: str, pipe) -> None:
    names = {}
    exec(code, names)
    pipe.send(names.get("answer"))


@hookimpl
def verify(task: Sum, transcript):
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = multiprocessing.get_context("fork").Process(target=run, args=(transcript.reply, theirs))
        process.start()
    theirs.close()
    process.join(20)
    answer = ours.recv() if process.exitcode == 0 else None
    ours.close()
    return Verdict(reward=float(answer == task.total))
