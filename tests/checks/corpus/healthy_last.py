"""Fails nothing: the last answer of a reply is graded, which is a single answer; two tasks may have the same answer."""

from checks.bases.words import *


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        word = "".join(rng.choices("bcdfghjklm", k=rng.choice([5, 7])))
        yield Word.ask(f"Write {word} backwards.", word=word[::-1])


@hookimpl
def solve(task: Word):
    return Message(content=f"Answer: {task.word}")


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(transcript.reply.rpartition("Answer:")[2].strip() == task.word))
