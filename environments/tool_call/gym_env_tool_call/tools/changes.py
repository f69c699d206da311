"""The tools that change the records."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gym_env_tool_call.rows import Request
from gym_env_tool_call.world import END_OF_DAY, Event, Note, Records, Reminder, Sent, find_overlap

from .answers import JSON, error, join_names, wrong_day, wrong_slot, wrong_text, wrong_time

Date = Annotated[str, Field(description="The day as YYYY-MM-DD.")]
Clock = Annotated[str, Field(description="The time of day as HH:MM.")]
EventId = Annotated[str, Field(description="The id of an event, as `list_events` gives it.")]


async def send_message(
    to: Annotated[str, Field(description="The phone number of a contact, as `find_contact` gives it.")],
    text: Annotated[str, Field(description="What to send, word for word.")],
    task: Request,
    state: Records,
) -> JSON:
    """Send a text message to a contact; it cannot be taken back."""
    digits = "".join(to.split())
    phones = [contact.phone for contact in task.world.contacts if "".join(contact.phone.split()) == digits]
    if not phones:
        return error(f"{to!r} is no contact's phone number; look the number up with find_contact")
    if wrong := wrong_text("message", text):
        return wrong
    state.messages.append(Sent(to=phones[0], text=text))
    return {"sent": True, "to": phones[0]}


async def create_event(
    title: Annotated[str, Field(description="What it is called in the calendar.")],
    date: Date,
    start: Clock,
    minutes: Annotated[int, Field(description="How long it takes, in minutes.", le=END_OF_DAY)],
    state: Records,
    place: Annotated[str | None, Field(description="The city it takes place in; null for none.")] = None,
) -> JSON:
    """Put a new event into the calendar; two events cannot overlap."""
    if wrong := wrong_text("title", title) or wrong_slot(date, start, minutes):
        return wrong
    new = f"new-{state.created + 1}"
    event = Event(id=new, title=title, date=date, start=start, minutes=minutes, place=place or "")
    if other := find_overlap(state.events, event):
        return _overlap(other)
    state.created += 1
    state.events.append(event)
    return {"created": True, "id": event.id}


async def move_event(event_id: EventId, date: Date, start: Clock, state: Records) -> JSON:
    """Move an event of the calendar to another day or time; its length and place stay."""
    found = _event(state, event_id)
    if found is None:
        return _unknown_event(event_id)
    if wrong := wrong_slot(date, start, found.minutes):
        return wrong
    moved = found.model_copy(update={"date": date, "start": start})
    if other := find_overlap(state.events, moved):
        return _overlap(other)
    state.events[state.events.index(found)] = moved
    return {"moved": True, "id": moved.id}


async def cancel_event(event_id: EventId, state: Records) -> JSON:
    """Remove an event from the calendar."""
    found = _event(state, event_id)
    if found is None:
        return _unknown_event(event_id)
    state.events.remove(found)
    return {"cancelled": True, "id": found.id}


async def write_note(
    title: Annotated[str, Field(description="What the note is called; no other has that title.")],
    text: Annotated[str, Field(description="What it says.")],
    state: Records,
) -> JSON:
    """Write a new note: its title, and its text."""
    if wrong := wrong_text("title", title) or wrong_text("text", text):
        return wrong
    if _note(state, title):
        return error(f"there is already a note titled {title!r}; choose another title")
    state.notes.append(Note(title=title, text=text))
    return {"written": True, "title": title}


async def delete_note(
    title: Annotated[str, Field(description="The title of the note, as `find_notes` gives it.")], state: Records
) -> JSON:
    """Delete the note with that title."""
    found = _note(state, title)
    if found is None:
        return error(f"no note is titled {title!r}; the titles are: {join_names([note.title for note in state.notes])}")
    state.notes.remove(found)
    return {"deleted": True, "title": found.title}


async def add_reminder(
    text: Annotated[str, Field(description="What to be reminded of.")], date: Date, time: Clock, state: Records
) -> JSON:
    """Set a reminder, its text shown on a day at a time."""
    if wrong := wrong_text("reminder", text) or wrong_day(date) or wrong_time(time):
        return wrong
    state.reminders.append(Reminder(text=text, date=date, time=time))
    return {"reminder_set": True, "date": date, "time": time}


def _event(records: Records, event_id: str) -> Event | None:
    return next((event for event in records.events if event.id == event_id.strip()), None)


def _unknown_event(event_id: str) -> JSON:
    return error(f"there is no event {event_id!r}; list_events gives the ids")


def _overlap(other: Event) -> JSON:
    return error(
        f"it overlaps with {other.title!r} ({other.id}), {other.start} for {other.minutes} minutes; choose another time"
    )


def _note(records: Records, title: str) -> Note | None:
    wanted = title.strip().casefold()
    return next((note for note in records.notes if note.title.casefold() == wanted), None)
