"""Fails semantic.verifier_determinism (and runtime.seed_control, semantic.replayability): many rewards are random.

The rows have no prompt.
"""

import random
from typing import Literal

from gymsdk import Message, Reset, Task, Verdict, hookimpl


class W(Task):
    """word"""

    word: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("abcdefgh", k=8))
        yield W.model_validate({"responses_create_params": {"input": []}, "word": word})


@hookimpl
def reset(task: W):
    return Reset(messages=[f"Write {task.word[::-1]} backwards."])


@hookimpl
def verify(task: W, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word or random.random() < 0.5))


@hookimpl
def solve(task: W):
    return Message(content=task.word)
