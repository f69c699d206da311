"""Fails nothing: pictures in the prompt, options in another script, a lifespan beside plain `def` hooks."""

import random
from contextlib import asynccontextmanager
from typing import Literal

from gymsdk import Claims, Message, Task, Verdict, hookimpl


class P(Task):
    """letter"""

    letter: str


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


@hookimpl
@asynccontextmanager
async def lifespan():
    yield {"ok": 1}


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        letter = rng.choice("ЖБЛГ")
        asked = f"Что на картинке № {rng.randrange(10**9)}?\nЖ) кошка\nБ) собака\nЛ) лошадь\nГ) корова"
        picture = {"type": "input_image", "image_url": "data:image/png;base64," + PNG}
        said = {"role": "user", "content": [{"type": "input_text", "text": asked}, picture]}
        yield P.model_validate({"responses_create_params": {"input": [said]}, "letter": letter})


@hookimpl
def verify(task: P, transcript, shared):
    return Verdict(reward=float(transcript.reply.strip() == task.letter))


@hookimpl
def solve(task: P):
    return Message(content=task.letter)


@hookimpl
def claims():
    return Claims(chance=0.25)
