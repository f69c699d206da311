"""The world of an assistant: what it can look up but never change, and the records an episode starts from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat

from .clock import Day
from .records import Records

Condition = Literal["sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "stormy"]


class Known(BaseModel):
    """Something the world knows and no tool changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Contact(Known):
    """A person in the address book; *relation* is what the user calls them, such as `dentist`."""

    name: str
    phone: str
    email: str = ""
    city: str = ""
    relation: str = ""


class Forecast(Known):
    """The weather of one city on one day."""

    condition: Condition
    celsius: int


class Place(Known):
    """Where a city lies, in degrees."""

    latitude: float
    longitude: float


class World(Known):
    """Everything the tools answer from.

    *weather* is by city, then by day; without it, it is cold everywhere. *rates* say how much of a currency one
    unit of a common one buys, by the currency's code.
    """

    today: Day = "2026-01-05"
    contacts: list[Contact] = []
    weather: dict[str, dict[Day, Forecast]] | None = None
    rates: dict[str, PositiveFloat] = {}
    places: dict[str, Place] = {}
    records: Records = Records()


def matching(contacts: list[Contact], words: str) -> list[Contact]:
    """Give the contacts whose name or relation holds every one of *words*."""
    wanted = words.casefold().split()
    return [contact for contact in contacts if wanted and set(wanted) <= _words(contact)]


def _words(contact: Contact) -> set[str]:
    return set(f"{contact.name} {contact.relation}".casefold().split())


def spelled(name: str, known: Iterable[str]) -> str | None:
    """Give the one of *known* that is *name*, whatever the case."""
    wanted = name.strip().casefold()
    return next((key for key in known if key.casefold() == wanted), None)
