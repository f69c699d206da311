"""Fails nothing: four options with a claimed chance."""

import random
from typing import Literal

from gymsdk import Claims, Message, Task, Verdict, hookimpl


class P(Task):
    """letter"""

    letter: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        right = rng.choice("ABCD")
        w = rng.sample([-30, -20, -10, 10, 20, 30], 4)
        opts = {
            mark: (one + other if mark == right else one + other + off) for mark, off in zip("ABCD", w, strict=True)
        }
        yield P.ask(
            f"What is {one}+{other}?\n" + "\n".join(f"{k}. {v}" for k, v in opts.items()) + "\nAnswer: <letter>",
            letter=right,
        )


@hookimpl
def verify(task: P, transcript):
    return Verdict(reward=float(transcript.reply.strip().removeprefix("Answer:").strip().upper() == task.letter))


@hookimpl
def solve(task: P):
    return Message(content=task.letter)


@hookimpl
def claims(task: P):
    return Claims(chance=0.25, variants=[f"Answer: {task.letter}", task.letter.lower()])
