"""Fails semantic.floor_gap: the verifier evaluates the reply, so the expression of the prompt is right."""

from checks.bases.sums import *


@hookimpl
def tasks(split: Literal["train", "validation"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two, three = (rng.randrange(30, 999) for _ in range(3))
        yield Sum.ask(f"Compute: {one} * {two} + {three}", total=one * two + three)


@hookimpl
def verify(task: Sum, transcript):
    try:
        value = eval(transcript.reply.strip()[:200], {})
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        value = None
    return Verdict(reward=float(type(value) is int and value == task.total))
