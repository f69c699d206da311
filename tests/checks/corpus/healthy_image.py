"""Fails nothing: pictures in the prompt, options in another script, a lifespan beside plain `def` hooks."""

from contextlib import asynccontextmanager

from checks.bases.words import *

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
        yield Word.model_validate({"responses_create_params": {"input": [said]}, "word": letter})


@hookimpl
def verify(task: Word, transcript, shared):
    return Verdict(reward=float(transcript.reply.strip() == task.word))


@hookimpl
def claims():
    return Claims(chance=0.25)
