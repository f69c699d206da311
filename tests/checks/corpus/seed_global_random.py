"""Fails runtime.seed_control: tasks are drawn from the global generator and ignore the seed."""

from checks.bases.sums import *


@hookimpl
def tasks(split: Literal["train"]):
    while True:
        one, other = random.randrange(1000), random.randrange(1000)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)
