"""Tests of the outputs of the tools and of their changes to the state."""

from __future__ import annotations

import json

import pytest

from gymsdk import ToolCall

WORLD = {
    "today": "2026-03-14",
    "contacts": [
        {"name": "Anna Berg", "relation": "sister", "phone": "+47 555 0101", "email": "a@example.com", "city": "Oslo"},
        {"name": "Anna Costa", "phone": "+351 555 0102", "city": "Porto"},
    ],
    "weather": {"Oslo": {"2026-03-14": {"condition": "snowy", "celsius": -4}}},
    "rates": {"EUR": 1.0, "USD": 1.1},
    "places": {"Oslo": {"latitude": 59.9, "longitude": 10.8}, "Porto": {"latitude": 41.1, "longitude": -8.6}},
    "records": {
        "events": [
            {"id": "e2", "title": "Lunch", "date": "2026-03-16", "start": "12:00", "minutes": 60, "place": "Oslo"},
            {"id": "e1", "title": "Gym", "date": "2026-03-16", "start": "08:00", "minutes": 30},
        ],
        "notes": [{"title": "Door", "text": "1234"}],
    },
}


@pytest.fixture
async def episode(environment):
    row = {"responses_create_params": {"input": "Hi"}, "world": WORLD, "expected": {"answer": 1}}
    return await environment.reset(row)


@pytest.fixture
def call(environment, episode):
    async def make(tool, /, **arguments):
        step = await environment.step(episode, ToolCall(name=tool, arguments=json.dumps(arguments)))
        return json.loads(step.output)

    return make


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        (
            "get_weather",
            {"city": "oslo", "date": None},
            {
                "city": "Oslo",
                "date": "2026-03-14",
                "weather_description": "The weather in Oslo is snowy.",
                "condition": "snowy",
                "celsius": -4,
            },
        ),
        ("convert_currency", {"amount": 10, "source": "eur", "target": "USD"}, {"amount": 11.0, "currency": "USD"}),
        (
            "convert_units",
            {"value": -4, "source": "celsius", "target": "fahrenheit"},
            {"value": 24.8, "unit": "fahrenheit"},
        ),
        (
            "convert_units",
            {"value": 26, "source": "miles", "target": "metres"},
            {"value": 41842.94, "unit": "metres"},
        ),
        (
            "get_distance",
            {"origin": "Oslo", "destination": "Porto"},
            {"origin": "Oslo", "destination": "Porto", "kilometres": 2480},
        ),
        ("find_notes", {"words": "door"}, {"notes": [{"title": "Door", "text": "1234"}]}),
    ],
)
async def test_a_lookup_returns_data_of_the_world(call, name, arguments, answer):
    assert await call(name, **arguments) == answer


async def test_contacts_are_found_by_name_and_by_relation(call):
    assert [contact["city"] for contact in (await call("find_contact", name="anna"))["contacts"]] == ["Oslo", "Porto"]
    assert [contact["city"] for contact in (await call("find_contact", name="Sister"))["contacts"]] == ["Oslo"]


async def test_events_are_listed_earliest_first(call):
    assert [event["id"] for event in (await call("list_events", date="2026-03-16"))["events"]] == ["e1", "e2"]
    assert (await call("list_events", date="2026-03-17"))["events"] == []


async def test_changes_affect_only_the_records_of_the_episode(call, episode):
    await call("send_message", to="+475550101", text="Hello")
    created = await call("create_event", title="Tea", date="2026-03-16", start="09:00", minutes=30, place=None)
    await call("move_event", event_id=created["id"], date="2026-03-16", start="09:30")
    await call("cancel_event", event_id="e1")
    await call("write_note", title="Gate", text="99")
    await call("delete_note", title="door")
    await call("add_reminder", text="sleep", date="2026-03-16", time="22:00")
    state = episode.state
    assert [(message.to, message.text) for message in state.messages] == [("+47 555 0101", "Hello")]
    assert [(event.title, event.start) for event in state.events] == [("Lunch", "12:00"), ("Tea", "09:30")]
    assert [note.title for note in state.notes] == ["Gate"]
    assert [reminder.time for reminder in state.reminders] == ["22:00"]
    assert len(episode.task.world.records.events) == 2


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("get_weather", {"city": "Rome", "date": None}, "no forecast for 'Rome'; there is one for: Oslo"),
        ("get_weather", {"city": "Oslo", "date": "2026-04-01"}, "no forecast for Oslo on 2026-04-01"),
        ("get_weather", {"city": "Oslo", "date": "today"}, "'today' is no date; write it as YYYY-MM-DD"),
        ("find_contact", {"name": "Zoe"}, "nobody in the address book goes by 'Zoe'"),
        ("find_contact", {"name": ""}, "nobody in the address book"),
        ("list_events", {"date": "20260316"}, "is no date"),
        ("find_notes", {"words": "cellar"}, "the notes are titled: Door"),
        ("convert_currency", {"amount": 1, "source": "EUR", "target": "XXX"}, "no rate for 'XXX'"),
        ("convert_currency", {"amount": 1.7e308, "source": "EUR", "target": "USD"}, "too large"),
        ("convert_units", {"value": 1, "source": "miles", "target": "celsius"}, "measure different things"),
        ("convert_units", {"value": 1e308, "source": "miles", "target": "feet"}, "too large"),
        ("get_distance", {"origin": "Oslo", "destination": "Rome"}, "not known where 'Rome' lies"),
        ("send_message", {"to": "Anna", "text": "Hi"}, "look the number up with find_contact"),
        ("send_message", {"to": "+47 555 0101", "text": " "}, "the message is empty"),
        (
            "create_event",
            {"title": "Tea", "date": "2026-03-16", "start": "12:30", "minutes": 5, "place": None},
            "overlaps with 'Lunch' (e2)",
        ),
        (
            "create_event",
            {"title": "Tea", "date": "2026-03-16", "start": "23:30", "minutes": 60, "place": None},
            "start it by 23:00",
        ),
        (
            "create_event",
            {"title": "Tea", "date": "2026-03-16", "start": "25:00", "minutes": 60, "place": None},
            "'25:00' is no time of day",
        ),
        (
            "create_event",
            {"title": "Tea", "date": "2026-03-16", "start": "10:00", "minutes": 0, "place": None},
            "at least one minute",
        ),
        ("move_event", {"event_id": "e1", "date": "2026-03-16", "start": "11:45"}, "overlaps with 'Lunch'"),
        ("move_event", {"event_id": "e9", "date": "2026-03-16", "start": "11:45"}, "list_events gives the ids"),
        ("cancel_event", {"event_id": "Lunch"}, "there is no event 'Lunch'"),
        ("write_note", {"title": "DOOR", "text": "5"}, "already a note titled 'DOOR'"),
        ("delete_note", {"title": "Cellar"}, "the titles are: Door"),
        ("add_reminder", {"text": "sleep", "date": "2026-02-30", "time": "22:00"}, "'2026-02-30' is no date"),
        ("add_reminder", {"text": "sleep", "date": "2026-03-16", "time": "10 pm"}, "'10 pm' is no time of day"),
    ],
)
async def test_a_mistake_returns_an_error_message_and_changes_nothing(call, episode, name, arguments, words):
    answer = await call(name, **arguments)
    assert list(answer) == ["error"]
    assert words in answer["error"]
    assert episode.state == episode.task.world.records


def test_every_tool_has_a_strict_schema_and_a_description(environment):
    schemas = [tool.schema for tool in environment.tools.values()]
    assert len(schemas) == 14
    assert all(schema["strict"] and schema["description"] for schema in schemas)


def test_every_parameter_of_every_tool_is_described(environment):
    told = {
        f"{tool.name}.{name}": parameter.get("description")
        for tool in environment.tools.values()
        for name, parameter in tool.schema["parameters"]["properties"].items()
    }
    assert not [name for name, words in told.items() if not words]
