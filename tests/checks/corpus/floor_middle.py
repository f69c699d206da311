"""Fails semantic.floor_gap: the right option is always the second."""

from checks.bases.sums import *


class Sum(Task):
    total: str


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        wrong = [one + other + off for off in rng.sample([-30, -20, -10, 10, 20, 30], 3)]
        text = f"A) {wrong[0]}\nB) {one + other}\nC) {wrong[1]}\nD) {wrong[2]}"
        yield Sum.ask(f"What is {one} + {other}? Answer with one letter.\n{text}", total="B")


@hookimpl
def claims():
    return Claims(chance=0.25)
