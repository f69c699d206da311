"""Requests that need no call: the text of the request contains all information."""

from __future__ import annotations

from gym_env_tool_call.world import add_days, format_time, parse_minutes

from .drafts import Draft, Kind, Scene
from .vocabulary import CITIES, EVENTS


def ends_at(scene: Scene) -> Draft:
    """Write a request for the end time of an event."""
    rng = scene.rng
    start, minutes = format_time(rng.randrange(6 * 12, 14 * 12) * 5), rng.randrange(65, 420, 5)
    title = rng.choice(EVENTS)
    texts = [
        f"The {title} starts at {start} and takes {minutes} minutes. At what time is it over? Give it as HH:MM.",
        f"If I walk into the {title} at {start} and it goes on for {minutes} minutes, when do I leave (HH:MM)?",
    ]
    return Draft(rng.choice(texts), answer=format_time(parse_minutes(start) + minutes))


def share(scene: Scene) -> Draft:
    """Write a request for one person's part of a bill."""
    rng = scene.rng
    people, cents = rng.randint(3, 9), rng.randint(705, 9950)
    total = people * cents / 100
    texts = [
        f"Dinner came to {total:.2f} EUR and the {people} of us split it evenly. What does each pay, to the cent?",
        f"We are {people} and owe {total:.2f} USD together, in equal parts. How much is my part, to the cent?",
    ]
    return Draft(rng.choice(texts), answer=cents / 100)


def days_later(scene: Scene) -> Draft:
    """Write a request for the date some days later."""
    rng = scene.rng
    date, days = add_days(scene.world.today, rng.randint(-60, 60)), rng.randint(9, 80)
    texts = [
        f"Which date is {days} days after {date}? Give it as YYYY-MM-DD.",
        f"I was told on {date} to come back {days} days later. Which date is that (YYYY-MM-DD)?",
    ]
    return Draft(rng.choice(texts), answer=add_days(date, days))


def warmer_by(scene: Scene) -> Draft:
    """Write a request for the difference of two temperatures in the text."""
    rng = scene.rng
    here, there = rng.sample(list(CITIES), 2)
    low, high = rng.randint(-30, 4), rng.randint(5, 42)
    text = (
        f"I read that it is {low} degrees in {here} and {high} degrees in {there} this morning."
        f" How many degrees warmer is {there}?"
    )
    return Draft(text, answer=high - low)


def discounted(scene: Scene) -> Draft:
    """Write a request for a price after a discount."""
    rng = scene.rng
    price, percent = rng.randint(31, 399), rng.choice((5, 10, 15, 20, 25, 30, 35, 40))
    text = f"A jacket costs {price} EUR and today there is {percent} % off. What do I pay, to the cent?"
    return Draft(text, answer=round(price * (100 - percent) / 100, 2))


KINDS = [Kind(write.__name__, 0, write) for write in (ends_at, share, days_later, warmer_by, discounted)]
