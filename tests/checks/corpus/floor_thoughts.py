"""Fails semantic.floor_gap: the policy's reasoning is graded together with its reply."""

from checks.bases.sums import *


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10, 99), rng.randrange(10, 99)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)


@hookimpl
def verify(task: Sum, transcript):
    words = []
    for item in transcript.items:
        if item.get("type") == "reasoning":
            for part in item.get("summary") or []:
                words += part.get("text", "").split()
    words += transcript.reply.split()[:1] if transcript.reply.strip().isdecimal() else []
    return Verdict(reward=float(str(task.total) in words))
