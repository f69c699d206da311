"""Fails runtime.seed_control: `reset` prints words in the order of a set, which differs between interpreters."""

from checks.bases.sums import *


class Sum(Task):
    total: str
    words: list[str]


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while words := ["".join(rng.choices("abcdefgh", k=8)) for _ in range(4)]:
        yield Sum.ask("Which word comes last in the alphabet? Reply with it.", total=max(words), words=words)


@hookimpl
def reset(task: Sum):
    return Reset(messages=["Words: " + " ".join(set(task.words))])


@hookimpl
def claims():
    return Claims(chance=0.25)
