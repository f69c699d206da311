"""Fails runtime.seed_control: `reset` prints words in the order of a set, which differs between interpreters."""

import random
from typing import Literal

from gymsdk import Claims, Message, Reset, Task, Verdict, hookimpl


class Q(Task):
    word: str
    words: list[str]


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        words = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(4)]
        yield Q.ask(
            "Which of these words comes last in the alphabet? Reply with the word.", word=max(words), words=words
        )


@hookimpl
def reset(task: Q):
    return Reset(messages=["Words: " + " ".join(set(task.words))])


@hookimpl
def solve(task: Q):
    return Message(content=task.word)


@hookimpl
def verify(task: Q, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word))


@hookimpl
def claims():
    return Claims(chance=0.25)
