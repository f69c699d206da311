"""Generate worlds: a week of a user's life, with the data that every kind of request needs."""

from __future__ import annotations

import random
import string
from typing import Any

from gym_env_tool_call.world import World, add_days, format_time

from .vocabulary import CITIES, CONDITIONS, CURRENCIES, EVENTS, FIRST_NAMES, LAST_NAMES, NOTES, RELATIONS

FIRST_DAY = "2025-01-01"
DAYS = 7
"""The number of days with forecasts, including today."""

BUSY_DAY = 2
"""The number of events on the only day with more than one event."""


def world(rng: random.Random) -> World:
    """Generate a random world.

    Two contacts share a first name. One day has two events. There are rainy days and days without rain.
    """
    today = add_days(FIRST_DAY, rng.randrange(1500))
    cities = rng.sample(list(CITIES), 6)
    return World.model_validate(
        {
            "today": today,
            "contacts": _contacts(rng, cities),
            "weather": _weather(rng, cities, today),
            "rates": _rates(rng),
            "places": {city: dict(zip(("latitude", "longitude"), CITIES[city], strict=True)) for city in cities},
            "records": {"events": _events(rng, cities, today), "notes": _notes(rng)},
        }
    )


def _contacts(rng: random.Random, cities: list[str]) -> list[dict[str, Any]]:
    first = rng.sample(FIRST_NAMES, 6)
    first[1] = first[0]
    last = rng.sample(LAST_NAMES, 6)
    relations = [*rng.sample(RELATIONS, 3), "", "", ""]
    rng.shuffle(relations)
    rows = [
        {
            "name": f"{one} {two}",
            "relation": relation,
            "phone": f"+{rng.randint(20, 98)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}",
            "email": f"{one}.{two}{rng.randint(10, 99)}@example.com".lower(),
            "city": city,
        }
        for one, two, relation, city in zip(first, last, relations, cities, strict=True)
    ]
    rng.shuffle(rows)
    return rows


def _weather(rng: random.Random, cities: list[str], today: str) -> dict[str, Any]:
    size = len(cities) * DAYS
    conditions = [CONDITIONS[index % len(CONDITIONS)] for index in range(size)]
    rng.shuffle(conditions)
    return {
        city: {
            add_days(today, offset): {"condition": conditions.pop(), "celsius": rng.randint(-15, 38)}
            for offset in range(DAYS)
        }
        for city in cities
    }


def _rates(rng: random.Random) -> dict[str, float]:
    codes = rng.sample(list(CURRENCIES), 5)
    return {code: round(CURRENCIES[code] * rng.uniform(0.9, 1.1), 4) for code in codes}


def _events(rng: random.Random, cities: list[str], today: str) -> list[dict[str, Any]]:
    offsets = rng.sample(range(1, DAYS), 4)
    offsets += offsets[: BUSY_DAY - 1]
    # Start times at least an hour apart, so that no two events of a day overlap.
    hours = rng.sample(range(8, 19, 2), len(offsets))
    titles = rng.sample(EVENTS, len(offsets))
    ids = rng.sample(range(1000, 9999), len(offsets))
    return [
        {
            "id": f"evt-{number}",
            "title": title,
            "date": add_days(today, offset),
            "start": format_time(hour * 60 + rng.choice((0, 15, 30))),
            "minutes": rng.choice((30, 45, 60, 75, 90)),
            "place": rng.choice(cities),
        }
        for number, title, offset, hour in zip(ids, titles, offsets, hours, strict=True)
    ]


def _notes(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {"title": title, "text": "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))}
        for title in rng.sample(NOTES, 3)
    ]
