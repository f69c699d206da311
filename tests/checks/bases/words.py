"""Words to write backwards."""

from checks.bases.sums import *


class Word(Task):
    word: str


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while word := "".join(rng.choices("abcdefgh", k=8)):
        yield Word.ask(f"Write {word} backwards.", word=word[::-1])


@hookimpl
def solve(task: Word):
    return Message(content=task.word)


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(transcript.reply.strip() == task.word))
