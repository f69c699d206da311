"""The records that an assistant may change, and their comparison."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gymsdk import State

from .clock import Day, Time, minute

Fact: TypeAlias = tuple[str, ...]
"""A record in comparable form: its type, then its normalized fields without the id."""

DECIMALS = re.compile(r"(?<!\d)(\d++)\.(\d++)")
EDGES = " \t\r\n\"'`.,!;:\u2018\u2019\u201c\u201d"


class Record(BaseModel):
    """A single record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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


def facts(records: Records) -> Counter[Fact]:
    """Count the facts in *records*."""
    entries: list[Record] = [*records.events, *records.notes, *records.reminders, *records.messages]
    return Counter(map(_fact, entries))


def subtract_records(records: Records, other: Records) -> Records:
    """Return the records in *records* whose fact does not occur in *other*."""
    known = facts(other)
    return Records(
        events=[each for each in records.events if _fact(each) not in known],
        notes=[each for each in records.notes if _fact(each) not in known],
        reminders=[each for each in records.reminders if _fact(each) not in known],
        messages=[each for each in records.messages if _fact(each) not in known],
    )


def _fact(record: Record) -> Fact:
    return (type(record).__name__, *(plain(str(value)) for name, value in record if name != "id"))


def plain(text: str) -> str:
    """Normalize *text*: ignore case, spacing, quotes and punctuation at the edges, and trailing zeros of decimals."""
    even = " ".join(text.casefold().split()).strip(EDGES)
    return DECIMALS.sub(_shortest, even)


def _shortest(number: re.Match[str]) -> str:
    decimals = number[2].rstrip("0")
    return f"{number[1]}.{decimals}" if decimals else number[1]


def clash(events: list[Event], candidate: Event) -> Event | None:
    """Return an event that overlaps *candidate* and has another id, or `None`."""
    start, end = _span(candidate)
    for event in events:
        if event.date != candidate.date or event.id == candidate.id:
            continue
        first, last = _span(event)
        if first < end and start < last:
            return event
    return None


def _span(event: Event) -> tuple[int, int]:
    start = minute(event.start)
    return start, start + event.minutes
