"""Fails runtime.verdicts (and semantic.oracle_max, semantic.reward_range): a verdict contains a non-JSON value."""

import random
from typing import Any, Literal

from pydantic import ConfigDict

from gymsdk import Message, Task, Verdict, hookimpl


class W(Task):
    """word"""

    word: str


class V(Verdict):
    """v"""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: Any = None


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("abcdefgh", k=8))
        yield W.ask(f"Write {word} backwards.", word=word[::-1])


@hookimpl
def verify(task: W, transcript):
    return V(reward=float(transcript.reply.strip() == task.word), thing=object())


@hookimpl
def solve(task: W):
    return Message(content=task.word)
