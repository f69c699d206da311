"""Fails nothing: a setting is required."""

from checks.bases.words import *


class Settings(Config):
    """level: how many letters a word has."""

    level: int


@hookimpl
def tasks(split: Literal["train", "test"], seed, config: Settings):
    rng = random.Random(f"{split}:{seed}")
    while word := "".join(rng.choices("abcdefgh", k=config.level)):
        yield Word.ask(f"Write {word} backwards.", word=word[::-1])
