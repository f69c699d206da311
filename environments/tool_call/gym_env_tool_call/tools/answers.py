"""Tool outputs: a JSON object with the result, or with an error message."""

from __future__ import annotations

from typing import TypeAlias

from gym_env_tool_call.world import END_OF_DAY, format_time, parse_day, parse_minutes

JSON: TypeAlias = dict[str, object]


def error(sentence: str) -> JSON:
    """Return an error output. *sentence* states what is wrong and what to do."""
    return {"error": sentence}


def wrong_day(text: str) -> JSON | None:
    """Return an error output if *text* is not a date, else `None`."""
    try:
        parse_day(text)
    except ValueError as problem:
        return error(str(problem))
    return None


def wrong_time(text: str) -> JSON | None:
    """Return an error output if *text* is not a time of day, else `None`."""
    try:
        parse_minutes(text)
    except ValueError as problem:
        return error(str(problem))
    return None


def wrong_slot(date: str, start: str, minutes: int) -> JSON | None:
    """Return an error output if an event cannot have this date, start and length, else `None`."""
    if wrong := wrong_day(date) or wrong_time(start):
        return wrong
    if minutes < 1:
        return error("an event takes at least one minute; give a positive number of minutes")
    if parse_minutes(start) + minutes > END_OF_DAY:
        latest = format_time(END_OF_DAY - minutes) if minutes < END_OF_DAY else "00:00"
        return error(f"the event would run past midnight; make it shorter or start it by {latest}")
    return None


def wrong_text(what: str, text: str) -> JSON | None:
    """Return an error output if *text* is blank, else `None`. *what* names the text in the message."""
    return None if text.strip() else error(f"the {what} is empty; write one")


def join_names(names: list[str]) -> str:
    """Join *names* with commas, or return `none` if there are no names."""
    return ", ".join(names) or "none"
