"""Fails semantic.floor_gap: one of four letters is right, but no chance is claimed."""

from checks.bases.sums import *


class Choice(Task):
    letter: str


@hookimpl
def tasks(split: Literal["train", "validation", "test", "example"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        numbers = rng.sample(range(100, 999), 4)
        options = "\n".join(f"{letter}) {number}" for letter, number in zip("ABCD", numbers, strict=True))
        yield Choice.ask(f"Which is the largest?\n{options}", letter="ABCD"[numbers.index(max(numbers))])


@hookimpl
def solve(task: Choice):
    return Message(content=task.letter)


@hookimpl
def verify(task: Choice, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.letter))
