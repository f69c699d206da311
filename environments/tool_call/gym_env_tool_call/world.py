"""The world of an episode: dates and times, the records that the assistant may change, and those of the lookups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import date, timedelta
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

from gymsdk import State

HOURS_AND_MINUTES = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
END_OF_DAY = 24 * 60


def parse_day(text: str) -> date:
    """Parse a date.

    Args:
        text: A date as `YYYY-MM-DD`.

    Returns:
        The date.

    Raises:
        ValueError: *text* is not such a date. The policy may read the message.
    """
    try:
        found = date.fromisoformat(text)
    except ValueError:
        found = None
    # `fromisoformat` also accepts week dates and dates without hyphens. As text, these never equal other dates.
    if found is None or found.isoformat() != text:
        raise ValueError(f"{text!r} is no date; write it as YYYY-MM-DD, for example 2026-03-14")
    return found


def parse_minutes(text: str) -> int:
    """Parse a time of day.

    Args:
        text: A time as `HH:MM`.

    Returns:
        The minutes since midnight.

    Raises:
        ValueError: *text* is not such a time. The policy may read the message.
    """
    found = HOURS_AND_MINUTES.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time of day; write it as HH:MM, for example 09:30")
    return int(found[1]) * 60 + int(found[2])


def format_time(minutes: int) -> str:
    """Write the time of day *minutes* after midnight."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def add_days(text: str, days: int) -> str:
    """Return the date *days* after the date *text*."""
    return (parse_day(text) + timedelta(days=days)).isoformat()


def _check_day(text: str) -> str:
    parse_day(text)
    return text


def _check_time(text: str) -> str:
    parse_minutes(text)
    return text


Day = Annotated[str, AfterValidator(_check_day)]
Time = Annotated[str, AfterValidator(_check_time)]


Fact: TypeAlias = tuple[str, ...]
"""A record in comparable form: its type, then its normalized fields without the id."""

DECIMALS = re.compile(r"(?<!\d)(\d++)\.(\d++)")
EDGES = " \t\r\n\"'`.,!;:\u2018\u2019\u201c\u201d"


_FIELD_SETS: dict[frozenset[str], set[str]] = {}


class Frozen(BaseModel):
    """A model that never changes. Models with the same fields share the set that names them.

    pydantic gives every model such a set, and the sets would be half of the memory of a task.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_post_init(self, _: Any, /) -> None:
        """Share the set of the fields that the data had."""
        fields = self.model_fields_set
        object.__setattr__(self, "__pydantic_fields_set__", _FIELD_SETS.setdefault(frozenset(fields), fields))


class Record(Frozen):
    """A single record."""


class Event(Record):
    """A calendar entry. The tools identify it by *id*."""

    id: str = ""
    title: str
    date: Day
    start: Time
    minutes: int = Field(gt=0)
    place: str = ""


class Note(Record):
    """A note. The tools identify it by its title."""

    title: str
    text: str


class Reminder(Record):
    """A reminder: a text with a date and a time."""

    text: str
    date: Day
    time: Time


class Sent(Record):
    """A text message sent to a phone number."""

    to: str
    text: str


class Records(State):
    """The state of an episode: the records. *created* counts the events created in the episode."""

    events: list[Event] = Field(default_factory=list)
    notes: list[Note] = Field(default_factory=list)
    reminders: list[Reminder] = Field(default_factory=list)
    messages: list[Sent] = Field(default_factory=list)
    created: int = 0


def count_facts(records: Records) -> Counter[Fact]:
    """Count the facts in *records*."""
    entries: list[Record] = [*records.events, *records.notes, *records.reminders, *records.messages]
    return Counter(map(_build_fact, entries))


def subtract_records(records: Records, other: Records) -> Records:
    """Return the records in *records* with a fact that does not occur in *other*."""
    known = count_facts(other)
    return Records(
        events=[each for each in records.events if _build_fact(each) not in known],
        notes=[each for each in records.notes if _build_fact(each) not in known],
        reminders=[each for each in records.reminders if _build_fact(each) not in known],
        messages=[each for each in records.messages if _build_fact(each) not in known],
    )


def _build_fact(record: Record) -> Fact:
    return (type(record).__name__, *(normalize_text(str(value)) for name, value in record if name != "id"))


def normalize_text(text: str) -> str:
    """Normalize *text*: ignore case, spacing, quotes and punctuation at the edges, and trailing zeros of decimals."""
    even = " ".join(text.casefold().split()).strip(EDGES)
    return DECIMALS.sub(_strip_zeros, even)


def _strip_zeros(number: re.Match[str]) -> str:
    decimals = number[2].rstrip("0")
    return f"{number[1]}.{decimals}" if decimals else number[1]


def find_overlap(events: list[Event], candidate: Event) -> Event | None:
    """Return an event that overlaps *candidate* and has another id, or `None`."""
    start, end = _get_span(candidate)
    for event in events:
        if event.date != candidate.date or event.id == candidate.id:
            continue
        first, last = _get_span(event)
        if first < end and start < last:
            return event
    return None


def _get_span(event: Event) -> tuple[int, int]:
    start = parse_minutes(event.start)
    return start, start + event.minutes


Condition = Literal["sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "stormy"]


class Known(Frozen):
    """Information that no tool changes."""


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
    contacts: list[Contact] = Field(default_factory=list)
    weather: dict[str, dict[Day, Forecast]] | None = None
    rates: dict[str, PositiveFloat] = Field(default_factory=dict)
    places: dict[str, Place] = Field(default_factory=dict)
    records: Records = Field(default_factory=Records)


def find_contacts(contacts: list[Contact], words: str) -> list[Contact]:
    """Return the contacts that contain, in name and relation together, all *words*."""
    wanted = words.casefold().split()
    return [contact for contact in contacts if wanted and set(wanted) <= _words(contact)]


def _words(contact: Contact) -> set[str]:
    return set(f"{contact.name} {contact.relation}".casefold().split())


def find_name(name: str, known: Iterable[str]) -> str | None:
    """Return the item of *known* that equals *name*, ignoring case, or `None`."""
    wanted = name.strip().casefold()
    return next((key for key in known if key.casefold() == wanted), None)
