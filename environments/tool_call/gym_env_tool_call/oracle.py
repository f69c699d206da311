"""The oracle: the next turn of a perfect policy, using the outputs of earlier calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gymsdk import Message, ToolCall, Transcript

from .rows import Call, Expected, Plan, Request, fill_references, group_turns, referenced_calls
from .world import Event, Note, Record, Records, Reminder, Sent, normalize_text


def parse_output(texts: Mapping[str, str], call: ToolCall) -> Any:
    """Return the output of *call* as a JSON value, or `None` if there is no output or it is not JSON."""
    try:
        return json.loads(texts.get(call.call_id, ""))
    except (ValueError, RecursionError):
        return None


ANY_CITY = "San Francisco"


def plan_next_turn(task: Request, transcript: Transcript) -> Message | list[ToolCall]:
    """Return the calls of the next turn, or the reply after the last call."""
    plan = get_plan(task)
    made = transcript.calls()
    order = [number for turn in group_turns(plan) for number in turn]
    texts = transcript.outputs()
    known = {number: parse_output(texts, call) for number, call in zip(order, made, strict=False)}
    if len(made) < len(order):
        return [_build_call(plan.calls[number], known) for number in _list_upcoming(task, plan, len(made))]
    return Message(content=_format_reply(fill_references(plan.answer, known)))


def get_plan(task: Request) -> Plan:
    """Return the plan of the row, or a plan derived from its `ground_truth` or its `expected` records."""
    if task.plan is not None:
        return task.plan
    if task.ground_truth is not None:
        return Plan(calls=task.ground_truth)
    if task.expected is not None:
        return Plan(calls=_plan_changes(task.expected, task.world.records), answer=task.expected.answer)
    return Plan(calls=[Call(name="get_weather", arguments={"city": ANY_CITY})])


def _list_upcoming(task: Request, plan: Plan, made: int) -> list[int]:
    for turn in group_turns(plan):
        if made < len(turn):
            return turn[made : made + 1] if task.one_at_a_time else turn[made:]
        made -= len(turn)
    return []


def _build_call(call: Call, known: dict[int, Any]) -> ToolCall:
    arguments = fill_references(call.arguments, known)
    return ToolCall.model_validate({"name": call.name, "arguments": arguments})


def _format_reply(answer: Any) -> str:
    if answer is None:
        return "Done."
    return "I could not find that out." if referenced_calls(answer) else f"Done.\nAnswer: {answer}"


def _plan_changes(expected: Expected, start: Records) -> list[Call]:
    """Return the calls that make the expected changes.

    Removals come first, because an old record may conflict with a new record.
    """
    gone = [
        *(_plan_cancellation(event, start) for event in expected.removed.events),
        *map(_plan_deletion, expected.removed.notes),
    ]
    added = expected.added
    return [*gone, *map(_plan_creation, [*added.events, *added.notes, *added.reminders, *added.messages])]


def _plan_cancellation(event: Event, start: Records) -> Call:
    ids = [each.id for each in start.events if _get_identity(each) == _get_identity(event)]
    return Call(name="cancel_event", arguments={"event_id": ids[0] if ids else event.id})


def _get_identity(event: Event) -> tuple[str, str, str]:
    return normalize_text(event.title), event.date, event.start


def _plan_deletion(note: Note) -> Call:
    return Call(name="delete_note", arguments={"title": note.title})


def _plan_creation(record: Record) -> Call:
    tools = {Event: "create_event", Note: "write_note", Reminder: "add_reminder", Sent: "send_message"}
    return Call(name=tools[type(record)], arguments=record.model_dump(exclude={"id"}))
