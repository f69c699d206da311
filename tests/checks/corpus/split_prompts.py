"""Fails semantic.split_overlap: the splits have the same prompts and differ in another field only."""

from checks.bases.words import *


@hookimpl
def tasks(split: Literal["train", "validation"]):
    for number in range(500):
        word = "".join(random.Random(number).choices("abcdefgh", k=8))
        yield Word.ask(f"Write {word} backwards.", word=word[::-1], source=split)
