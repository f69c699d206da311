"""The tools of the assistant: lookups, and changes to the records."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from .answers import JSON
from .changes import add_reminder, cancel_event, create_event, delete_note, move_event, send_message, write_note
from .lookups import (
    convert_currency,
    convert_units,
    find_contact,
    find_notes,
    get_distance,
    get_weather,
    list_events,
)

Tool: TypeAlias = Callable[..., Coroutine[Any, Any, JSON]]

# No tool waits for anything. As coroutines, they run on the event loop without the cost of a thread.
TOOLS: dict[str, Tool] = {
    tool.__name__: tool
    for tool in (
        get_weather,
        find_contact,
        list_events,
        find_notes,
        convert_currency,
        convert_units,
        get_distance,
        send_message,
        create_event,
        move_event,
        cancel_event,
        write_note,
        delete_note,
        add_reminder,
    )
}
