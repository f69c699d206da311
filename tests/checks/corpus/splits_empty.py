"""Fails runtime.splits: the test split is declared but has no task."""

from checks.bases.sums import *


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while split == "train":
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)
