"""Requests: what is asked of the assistant, made up by the dice."""

from __future__ import annotations

from collections.abc import Collection

from . import errands, journeys, questions, reckoning
from .drafts import Draft, Kind, Scene

KINDS = {kind.name: kind for group in (reckoning, questions, errands, journeys) for kind in group.KINDS}


def mixtures(calls: tuple[int, int], names: Collection[str]) -> dict[int, list[tuple[Kind, bool]]]:
    """Give what needs each number of *calls*: a kind of *names* (none: all), by itself or with a chore beside it."""
    low, high = calls
    found: dict[int, list[tuple[Kind, bool]]] = {}
    for kind in KINDS.values():
        if names and kind.name not in names:
            continue
        # A chore would make a request that needs no call into one that does.
        for chore in (False, True) if kind.calls else (False,):
            if low <= kind.calls + chore <= high:
                found.setdefault(kind.calls + chore, []).append((kind, chore))
    return found


def draft(scene: Scene, kind: Kind, *, chore: bool) -> Draft:
    """Give a request of *kind*, with a chore beside it or without."""
    main = kind.write(scene)
    if not chore:
        return main
    # Two chores of one kind could get in each other's way: no two notes bear one title.
    beside = scene.rng.choice([each for each in errands.CHORES if each != kind]).write(scene)
    link = scene.rng.choice(["Also: ", "And one more thing: ", "Besides that: "])
    return Draft(f"{main.text} {link}{beside.text}", [*main.calls, *beside.calls], main.answer)
