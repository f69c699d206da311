"""Fails runtime.load: a setting without a default is required."""

from checks.bases.sums import *


class Settings(Config):
    """How large the numbers are: *digits* of them."""

    digits: int


@hookimpl
def tasks(split: Literal["train", "test"], seed, config: Settings):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**config.digits), rng.randrange(10**6)
        yield Sum.ask(f"What is {one} + {other}?", total=one + other)
