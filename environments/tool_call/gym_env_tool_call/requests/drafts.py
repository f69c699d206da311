"""A draft: the text of a request and the plan that fulfils it, without the expected end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gym_env_tool_call.rows import Answer, Call, Plan
from gym_env_tool_call.world import Event, World, add_days, find_contacts, find_overlap, format_time, parse_day

from .vocabulary import TEXTS
from .worlds import DAYS


@dataclass(frozen=True)
class Scene:
    """The input for writing a request: a world, and the source of randomness."""

    rng: random.Random
    world: World


@dataclass(frozen=True)
class Draft:
    """A request and its plan: the calls in order, and the answer if the request asks a question."""

    text: str
    calls: list[Call] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def plan(self) -> Plan:
        """The calls and the answer as the `plan` of a row."""
        return Plan(calls=self.calls, answer=self.answer)


@dataclass(frozen=True)
class Kind:
    """A kind of request: the number of calls that it needs, and the function that writes a request."""

    name: str
    calls: int
    write: Callable[[Scene], Draft]


@dataclass(frozen=True)
class Person:
    """A person in a request: the *words* for the person, the *query* to look up, the *index* in the search results."""

    name: str
    words: str
    query: str
    index: int
    city: str

    def of(self, call: int, key: str) -> str:
        """Return a reference to *key* of this person in the output of *call*."""
        return f"{{{call}.contacts.{self.index}.{key}}}"


def call(name: str, /, **arguments: object) -> Call:
    """Build a call of the tool *name*."""
    return Call(name=name, arguments=arguments)


def person(scene: Scene) -> Person:
    """Choose a person in the address book, and words for this person: a name, a relation, or a name and a city."""
    contacts = scene.world.contacts
    chosen = scene.rng.choice(contacts)
    first = chosen.name.split()[0]
    namesakes = find_contacts(contacts, first)
    if len(namesakes) > 1:
        words, query, index = f"{first} from {chosen.city}", first, namesakes.index(chosen)
    elif chosen.relation:
        words, query, index = f"my {chosen.relation}", chosen.relation, 0
    else:
        query = words = scene.rng.choice([first, chosen.name])
        index = 0
    return Person(chosen.name, words, query, index, chosen.city)


def people(scene: Scene) -> tuple[Person, Person]:
    """Choose two different persons."""
    one = person(scene)
    other = person(scene)
    while other.name == one.name:
        other = person(scene)
    return one, other


def lookup(who: Person) -> Call:
    """Build the call that finds *who*."""
    return call("find_contact", name=who.query)


def date(scene: Scene, *, earliest: int = 0) -> str:
    """Choose a day with a forecast, at least *earliest* days from today."""
    return add_days(scene.world.today, scene.rng.randrange(earliest, DAYS))


def named(scene: Scene, when: str) -> str:
    """Return words for a day: today, tomorrow, a weekday of the coming week, or the date."""
    offset = (parse_day(when) - parse_day(scene.world.today)).days
    if scene.rng.random() < 1 / 4:
        return f"on {when}"
    return {0: "today", 1: "tomorrow"}.get(offset) or f"on {parse_day(when):%A}"


def city(scene: Scene) -> str:
    """Choose a city with forecasts and coordinates."""
    return scene.rng.choice(list(scene.world.places))


def event(scene: Scene) -> tuple[Event, int]:
    """Choose a calendar event, and return it with its index among the events of its day."""
    events = scene.world.records.events
    chosen = scene.rng.choice(events)
    same_day = sorted((each for each in events if each.date == chosen.date), key=lambda each: each.start)
    return chosen, same_day.index(chosen)


def agenda(chosen: Event) -> Call:
    """Build the call that lists the events on the day of *chosen*."""
    return call("list_events", date=chosen.date)


def event_id(number: int, index: int) -> str:
    """Return a reference to the id of an event in the output of call *number*."""
    return f"{{{number}.events.{index}.id}}"


def free(scene: Scene, when: str, minutes: int) -> str:
    """Choose a start time on the day *when* so that the calendar is free for *minutes*."""
    times = [format_time(start) for start in range(7 * 60, 21 * 60, 15)]
    scene.rng.shuffle(times)
    events = scene.world.records.events
    slots = (Event(id="candidate", title="", date=when, start=start, minutes=minutes) for start in times)
    return next(slot.start for slot in slots if find_overlap(events, slot) is None)


def moment(scene: Scene) -> str:
    """Choose the time of a reminder."""
    return format_time(scene.rng.randrange(7 * 12, 21 * 12) * 5)


def message(scene: Scene) -> str:
    """Choose the text of a message."""
    return scene.rng.choice(TEXTS)
