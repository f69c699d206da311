"""Fails runtime.seed_control: tasks are drawn from a set of strings, whose order differs between processes."""

from checks.bases.words import *

CITIES = {"Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Dakar", "Minsk", "Seoul", "Sofia"}


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        city = list(CITIES)[rng.randrange(len(CITIES))]
        yield Word.ask(f"Spell the capital with {rng.randrange(10**6)} letters backwards: {city}", word=city[::-1])
