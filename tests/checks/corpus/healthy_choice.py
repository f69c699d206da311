"""Fails nothing: four options with a claimed chance."""

from checks.bases.words import *


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        right = rng.choice("ABCD")
        offsets = dict(zip("ABCD", rng.sample([-30, -20, -10, 10, 20, 30], 4), strict=True)) | {right: 0}
        options = "\n".join(f"{letter}. {one + other + off}" for letter, off in offsets.items())
        yield Word.ask(f"What is {one}+{other}?\n{options}\nAnswer: <letter>", word=right)


@hookimpl
def verify(task: Word, transcript):
    return Verdict(reward=float(transcript.reply.strip().removeprefix("Answer:").strip().upper() == task.word))


@hookimpl
def claims(task: Word):
    return Claims(chance=0.25, variants=[f"Answer: {task.word}", task.word.lower()])
