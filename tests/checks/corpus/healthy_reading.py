"""Fails nothing: the answer is one of several names in a text to read."""

from checks.bases.words import *

NAMES = ("Adam", "Beate", "Carlo", "Dunja", "Emile", "Fatou", "Gunnar", "Hedda")
THINGS = ("lamp", "chair", "clock", "piano", "stove", "mirror")


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        names = rng.sample(NAMES, 6)
        told = [f"The owner of the {thing} is {name}." for thing, name in zip(THINGS, names, strict=True)]
        asked, number = rng.randrange(6), rng.randrange(10**6)
        text = f"House {number}. {' '.join(rng.sample(told, 6))} Whose is the {THINGS[asked]}?"
        yield Word.ask(text, word=names[asked])


@hookimpl
def claims():
    return Claims(chance=0.167)
