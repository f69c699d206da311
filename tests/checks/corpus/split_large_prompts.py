"""Fails semantic.split_overlap: the prompts of the test split are in a train split of 100,000, with hidden blanks."""

from checks.bases.remainders import *


@hookimpl
def tasks(split: Literal["test", "train"], seed):
    blank = " " if split == "train" else " \u00a0\u200b"
    for number in NUMBERS if split == "train" else NUMBERS[60_000:60_300]:
        yield Sum.ask(f"What is the remainder{blank}of {number} by 9973?", number=number, source=split)
