"""Generate random requests to the assistant."""

from __future__ import annotations

from collections.abc import Collection

from . import errands, journeys, questions, reckoning
from .drafts import Draft, Kind, Scene

KINDS = {kind.name: kind for group in (reckoning, questions, errands, journeys) for kind in group.KINDS}


def mixtures(calls: tuple[int, int], names: Collection[str]) -> dict[int, list[tuple[Kind, bool]]]:
    """Group the possible requests by the number of calls that they need.

    Args:
        calls: The lowest and the highest number of calls.
        names: The kinds of request. Empty: all kinds.

    Returns:
        By number of calls, the kinds of request, each with whether an additional chore belongs to the request.
    """
    low, high = calls
    found: dict[int, list[tuple[Kind, bool]]] = {}
    for kind in KINDS.values():
        if names and kind.name not in names:
            continue
        # A chore needs a call, so a request that needs no call has no chore.
        for chore in (False, True) if kind.calls else (False,):
            if low <= kind.calls + chore <= high:
                found.setdefault(kind.calls + chore, []).append((kind, chore))
    return found


def draft(scene: Scene, kind: Kind, *, chore: bool) -> Draft:
    """Write a request of *kind*, with or without an additional chore."""
    main = kind.write(scene)
    if not chore:
        return main
    # Two chores of the same kind could conflict: two notes cannot have the same title.
    beside = scene.rng.choice([each for each in errands.CHORES if each != kind]).write(scene)
    link = scene.rng.choice(["Also: ", "And one more thing: ", "Besides that: "])
    return Draft(f"{main.text} {link}{beside.text}", [*main.calls, *beside.calls], main.answer)
