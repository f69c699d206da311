"""The oracle: the next turn of a perfect policy, using the outputs of earlier calls."""

from __future__ import annotations

from typing import Any

from gymsdk import Message, ToolCall, Transcript

from .outputs import outputs, parsed
from .records import Event, Note, Record, Records, Reminder, Sent, plain
from .references import fill_references, group_turns, referenced_calls
from .rows import Call, Expected, Plan, Request

ANY_CITY = "San Francisco"


def next_move(task: Request, transcript: Transcript) -> Message | list[ToolCall]:
    """Return the calls of the next turn, or the reply after the last call."""
    plan = plan_for(task)
    made = transcript.calls()
    order = [number for turn in group_turns(plan) for number in turn]
    texts = outputs(transcript)
    known = {number: parsed(texts, call) for number, call in zip(order, made, strict=False)}
    if len(made) < len(order):
        return [_call(plan.calls[number], known) for number in _upcoming(task, plan, len(made))]
    return Message(content=_reply(fill_references(plan.answer, known)))


def plan_for(task: Request) -> Plan:
    """Return the plan of the row, or a plan derived from its `ground_truth` or its `expected` records."""
    if task.plan is not None:
        return task.plan
    if task.ground_truth is not None:
        return Plan(calls=task.ground_truth)
    if task.expected is not None:
        return Plan(calls=_changes(task.expected, task.world.records), answer=task.expected.answer)
    return Plan(calls=[Call(name="get_weather", arguments={"city": ANY_CITY})])


def _upcoming(task: Request, plan: Plan, made: int) -> list[int]:
    for turn in group_turns(plan):
        if made < len(turn):
            return turn[made : made + 1] if task.one_at_a_time else turn[made:]
        made -= len(turn)
    return []


def _call(call: Call, known: dict[int, Any]) -> ToolCall:
    arguments = fill_references(call.arguments, known)
    return ToolCall.model_validate({"name": call.name, "arguments": arguments})


def _reply(answer: Any) -> str:
    if answer is None:
        return "Done."
    return "I could not find that out." if referenced_calls(answer) else f"Done.\nAnswer: {answer}"


def _changes(expected: Expected, start: Records) -> list[Call]:
    """Return the calls that make the expected changes.

    Removals come first, because an old record may conflict with a new record.
    """
    gone = [*(_cancelled(event, start) for event in expected.removed.events), *map(_deleted, expected.removed.notes)]
    added = expected.added
    return [*gone, *map(_made, [*added.events, *added.notes, *added.reminders, *added.messages])]


def _cancelled(event: Event, start: Records) -> Call:
    ids = [each.id for each in start.events if _identity(each) == _identity(event)]
    return Call(name="cancel_event", arguments={"event_id": ids[0] if ids else event.id})


def _identity(event: Event) -> tuple[str, str, str]:
    return plain(event.title), event.date, event.start


def _deleted(note: Note) -> Call:
    return Call(name="delete_note", arguments={"title": note.title})


def _made(record: Record) -> Call:
    tools = {Event: "create_event", Note: "write_note", Reminder: "add_reminder", Sent: "send_message"}
    return Call(name=tools[type(record)], arguments=record.model_dump(exclude={"id"}))
