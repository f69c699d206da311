"""Parse and write dates and times in the format of the rows and tools: `2026-03-14` and `09:30`."""

from __future__ import annotations

import re
from datetime import date, timedelta
from typing import Annotated

from pydantic import AfterValidator

HOURS_AND_MINUTES = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
END_OF_DAY = 24 * 60


def day(text: str) -> date:
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


def minute(text: str) -> int:
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


def time_of(minutes: int) -> str:
    """Write the time of day *minutes* after midnight."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def after(text: str, days: int) -> str:
    """Return the date *days* after the date *text*."""
    return (day(text) + timedelta(days=days)).isoformat()


def _written_day(text: str) -> str:
    day(text)
    return text


def _written_time(text: str) -> str:
    minute(text)
    return text


Day = Annotated[str, AfterValidator(_written_day)]
Time = Annotated[str, AfterValidator(_written_time)]
