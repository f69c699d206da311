"""What a tool answers: a JSON object, or one that says in a sentence what was wrong."""

from __future__ import annotations

from typing import TypeAlias

from gym_env_tool_call.clock import END_OF_DAY, day, minute, time_of

JSON: TypeAlias = dict[str, object]


def error(sentence: str) -> JSON:
    """Give the answer that says what was wrong and what to do about it."""
    return {"error": sentence}


def wrong_day(text: str) -> JSON | None:
    """Give the error of a date that is none."""
    try:
        day(text)
    except ValueError as problem:
        return error(str(problem))
    return None


def wrong_time(text: str) -> JSON | None:
    """Give the error of a time of day that is none."""
    try:
        minute(text)
    except ValueError as problem:
        return error(str(problem))
    return None


def wrong_slot(date: str, start: str, minutes: int) -> JSON | None:
    """Give the error of a time in the calendar that cannot be."""
    if wrong := wrong_day(date) or wrong_time(start):
        return wrong
    if minutes < 1:
        return error("an event takes at least one minute; give a positive number of minutes")
    if minute(start) + minutes > END_OF_DAY:
        latest = time_of(END_OF_DAY - minutes) if minutes < END_OF_DAY else "00:00"
        return error(f"the event would run past midnight; make it shorter or start it by {latest}")
    return None


def wrong_text(what: str, text: str) -> JSON | None:
    """Give the error of a *what* that is blank."""
    return None if text.strip() else error(f"the {what} is empty; write one")


def listed(names: list[str]) -> str:
    """Give *names* as a sentence lists them."""
    return ", ".join(names) or "none"
