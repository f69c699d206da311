"""Fails runtime.rows: a validator adds to a row at every read."""

from checks.bases.sums import *
from pydantic import field_validator


class Sum(Task):
    total: int
    notes: str = "sum"

    @field_validator("notes")
    @classmethod
    def _more(cls, notes):
        return f"{notes}!"


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        number = rng.randrange(10**6)
        yield Sum.ask(f"What is {number} + 1?", total=number + 1, notes="sum")
