"""Fails semantic.split_overlap: rows of a train split of 100,000 are the test split under new ids."""

from checks.bases.remainders import *


@hookimpl
def tasks(split: Literal["test", "train"], seed):
    rows = list(NUMBERS)
    random.Random(f"{split}:{seed}").shuffle(rows)
    for place, number in enumerate(rows if split == "train" else sorted(rows)[40_000:40_200]):
        yield Sum.ask(f"What is the remainder of {number} by 9973?", number=number, row_id=f"{split}-{place}")
