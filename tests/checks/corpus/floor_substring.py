"""Fails semantic.floor_gap: the expected answer may appear anywhere, so a reply with many numbers contains it."""

from checks.bases.sums import *


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        yield Sum.ask(f"What is {one} + {other}, modulo 150?", total=(one + other) % 150)


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(str(task.total) in transcript.reply))
