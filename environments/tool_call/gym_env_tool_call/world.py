"""The world of an assistant: fixed information to look up, and the initial records of an episode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat

from .clock import Day
from .records import Records

Condition = Literal["sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "stormy"]


class Known(BaseModel):
    """Information that no tool changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Contact(Known):
    """A person in the address book. *relation* is the user's word for the person, such as `dentist`."""

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
    """The coordinates of a city, in degrees."""

    latitude: float
    longitude: float


class World(Known):
    """The data behind the tools.

    Attributes:
        today: The current date.
        contacts: The address book.
        weather: The forecasts, by city and then by day. Without it, the weather is cold everywhere.
        rates: By currency code, the amount of each currency that one unit of a common base currency buys.
        places: The coordinates of each city.
        records: The records at the start of an episode.
    """

    today: Day = "2026-01-05"
    contacts: list[Contact] = []
    weather: dict[str, dict[Day, Forecast]] | None = None
    rates: dict[str, PositiveFloat] = {}
    places: dict[str, Place] = {}
    records: Records = Records()


def matching(contacts: list[Contact], words: str) -> list[Contact]:
    """Return the contacts whose name and relation together contain all *words*."""
    wanted = words.casefold().split()
    return [contact for contact in contacts if wanted and set(wanted) <= _words(contact)]


def _words(contact: Contact) -> set[str]:
    return set(f"{contact.name} {contact.relation}".casefold().split())


def find_name(name: str, known: Iterable[str]) -> str | None:
    """Return the item of *known* that equals *name*, ignoring case, or `None`."""
    wanted = name.strip().casefold()
    return next((key for key in known if key.casefold() == wanted), None)
