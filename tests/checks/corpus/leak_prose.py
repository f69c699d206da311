"""Fails semantic.no_solution_leakage: a sentence of the prompt contains the answer."""

from checks.bases.words import *


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        land, town = ("".join(rng.choices("bdfglmnr", k=6)).title() for _ in range(2))
        yield Word.ask(f"What is the capital of {land}? Context: the capital is {town}.", word=town)
