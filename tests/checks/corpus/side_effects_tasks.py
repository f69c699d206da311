"""Fails runtime.side_effects (and runtime.seed_control): `tasks` seeds the global generator."""

from checks.bases.sums import *


@hookimpl
def tasks(split: Literal["train"], seed):
    random.seed(seed)
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(1000), rng.randrange(1000)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)
