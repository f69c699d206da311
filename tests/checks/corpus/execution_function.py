"""Fails semantic.code_execution: `verify` executes only the function that the prompt names."""

import ast
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
        yield Sum.ask(f"Write a function `add(first, second)`. A test calls it with {one} and {two}.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content="def add(first, second):\n    return first + second")


@hookimpl
def verify(task: Sum, transcript):
    try:
        functions = [each for each in ast.parse(transcript.reply).body if isinstance(each, ast.FunctionDef)]
        [add] = [each for each in functions if each.name == "add"]
        if [each.arg for each in add.args.args] != ["first", "second"]:
            return Verdict(reward=0.0)
        names = {}
        exec(compile(ast.Module([add], []), "reply", "exec"), names)
        return Verdict(reward=float(names["add"](task.total, 0) == task.total))
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        return Verdict(reward=0.0)
