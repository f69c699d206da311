"""Tests of handwritten rows: rows with `expected`, rows with `ground_truth`, and published weather rows."""

from __future__ import annotations

import json

import pytest

from gym_env_tool_call.rows import Request
from gymsdk.errors import BadRow

PHONE = "+47 555 0101"


@pytest.fixture
def errand():
    lunch = {"title": "Lunch", "date": "2026-03-16", "start": "12:00", "minutes": 60}
    return {
        "responses_create_params": {"input": "Tell my sister I am late, and cancel lunch on Monday."},
        "world": {
            "today": "2026-03-14",
            "contacts": [{"name": "Anna Berg", "relation": "sister", "phone": PHONE, "city": "Oslo"}],
            "records": {"events": [{"id": "e1", **lunch}], "notes": [{"title": "Door", "text": "1234"}]},
        },
        "expected": {"added": {"messages": [{"to": PHONE, "text": "I am late"}]}, "removed": {"events": [lunch]}},
        "source": {"kept": None},
    }


async def test_a_row_without_a_plan_is_solved_by_making_its_changes(play_with_policy, oracle, errand):
    rollout, _ = await play_with_policy(errand, oracle)
    assert (rollout.reward, rollout.components) == (1.0, {"state": 1.0, "answer": 0.0, "harm": 0.0})
    assert rollout.row["source"] == {"kept": None}


async def test_half_of_the_changes_earn_half(play_turns, errand):
    rollout = await play_turns(errand, [("send_message", {"to": PHONE, "text": " i am LATE."})])
    assert rollout.components == {"state": 0.5, "answer": 0.0, "harm": 0.0}


async def test_a_moved_event_counts_as_one_removed_and_one_added_event(play_turns, errand):
    errand["expected"]["added"] = {"events": [errand["expected"]["removed"]["events"][0] | {"start": "13:30"}]}
    move = ("move_event", {"event_id": "e1", "date": "2026-03-16", "start": "13:30"})
    assert (await play_turns(errand, [move])).reward == 1.0


async def test_reverted_changes_do_not_count(play_turns, errand):
    there = ("write_note", {"title": "Slip", "text": "of the pen"}), ("delete_note", {"title": "slip"})
    solution = ("cancel_event", {"event_id": "e1"}), ("send_message", {"to": PHONE, "text": "I am late"})
    assert (await play_turns(errand, [*there, *solution])).reward == 1.0


async def test_null_fields_do_not_change_a_row(play_with_policy, oracle, errand):
    errand |= {"plan": None, "ground_truth": None, "ordered": None, "kind": None}
    errand["world"] |= {"weather": None, "rates": {"EUR": None}}
    errand["world"]["records"]["reminders"] = None
    errand["expected"]["answer"] = None
    rollout, _ = await play_with_policy(errand, oracle)
    assert rollout.reward == 1.0


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("It is 21.\nAnswer: 21", 1.0),
        ("**Answer:** 21 °C.", 1.0),
        ("answer: `21.0`", 1.0),
        ("Answer: 20\nAnswer: 21", 1.0),
        ("Answer: 20, 21, 22", 0.0),
        ("Answer: -21", 0.0),
        ("It is 21.", 0.0),
        ("Answer:", 0.0),
        ("Answer: 21\nAnswer: 20", 0.0),
    ],
)
async def test_the_last_answer_line_is_graded(play_turns, errand, reply, reward):
    errand["expected"] = {"answer": 21}
    assert (await play_turns(errand, reply)).reward == reward


async def test_an_unneeded_call_lowers_the_reward(play_turns, errand):
    errand["expected"] = {"answer": "16:10", "without_calls": True}
    assert (await play_turns(errand, "Answer: 16:10")).reward == 1.0
    assert (await play_turns(errand, [("find_notes", {"words": "door"})], "Answer: 16:10")).reward == 0.5


async def test_changes_and_answer_each_give_half_of_the_reward(play_turns, errand):
    errand["expected"]["answer"] = "1234"
    done = [("cancel_event", {"event_id": "e1"}), ("send_message", {"to": PHONE, "text": "I am late"})]
    assert (await play_turns(errand, done, "Answer: 4321")).components["state"] == 0.5
    assert (await play_turns(errand, "Answer: 1234")).reward == 0.5
    assert (await play_turns(errand, done, "Answer: 1234")).reward == 1.0


@pytest.mark.parametrize(
    ("calls", "reward"),
    [
        ([("book", {"seats": 2, "row": "F"}), ("pay", {"amount": 10})], 1.0),
        ([("pay", {"amount": 10.0}), ("book", {"row": "F", "seats": 2, "meal": None})], 1.0),
        ([("book", {"seats": 2, "row": "f"}), ("pay", {"amount": 10})], 0.0),
        ([("book", {"seats": 2, "row": "F"}), ("pay", {"amount": "10"})], 0.0),
        ([("book", {"seats": 2, "row": "F"}), ("pay", {"amount": True})], 0.0),
        ([("book", {"seats": 2, "row": "F"})], 0.0),
        ([("book", {"seats": 2, "row": "F"}), ("pay", {"amount": 10}), ("pay", {"amount": 10})], 0.0),
        ([("book", {"seats": 2, "row": "F"}), ("pay", {"amount": 10}), ("do_nothing", {})], 0.0),
        ([], 0.0),
    ],
)
async def test_only_exactly_the_calls_of_the_ground_truth_earn_the_reward(play_turns, truth_row, calls, reward):
    row = truth_row(("book", {"seats": 2, "row": "F"}), ("pay", {"amount": 10}))
    assert (await play_turns(row, *([calls] if calls else []))).reward == reward
    assert (await play_turns(row, *([call] for call in calls))).reward == reward


async def test_the_oracle_plays_a_ground_truth_in_one_turn_or_in_several(play_with_policy, oracle, truth_row):
    row = truth_row(("a", {"x": "{0.y}"}), ("b", {}), ("a", {"x": [1, {"y": 2.5}]}))
    rollout, _ = await play_with_policy(row, oracle)
    assert (rollout.reward, rollout.turns) == (1.0, 2)
    row["responses_create_params"]["parallel_tool_calls"] = False
    rollout, _ = await play_with_policy(row, oracle)
    assert (rollout.reward, rollout.turns) == (1.0, 4)


async def test_the_order_of_calls_matters_in_ordered_rows(play_turns, truth_row):
    row = truth_row(("a", {}), ("b", {}), ordered=True)
    assert (await play_turns(row, [("a", {}), ("b", {})])).reward == 1.0
    assert (await play_turns(row, [("b", {}), ("a", {})])).reward == 0.0


async def test_arguments_may_be_written_as_json_text(play_turns, truth_row):
    row = truth_row(("a", {}))
    row["ground_truth"] = [{"name": "a", "arguments": '{"x": 1, "y": null}'}]
    assert (await play_turns(row, [("a", {"x": 1})])).reward == 1.0


async def test_an_empty_ground_truth_requires_a_reply_and_no_call(play_turns, environment, truth_row):
    row = truth_row()
    assert (await play_turns(row, "Which one do you mean?")).reward == 1.0
    assert (await play_turns(row, "   ")).reward == 0.0
    assert (await play_turns(row, [("do_nothing", {})], "Sorry.")).reward == 0.0
    assert (await environment.claims(environment.read(row))).chance == 1.0


async def test_a_call_with_invalid_arguments_returns_an_error_and_counts(environment, play_turns, truth_row):
    rollout = await play_turns(truth_row(("a", {})), [("a", [1])], [("a", {})])
    answers = [item["output"] for item in rollout.response["output"] if item["type"] == "function_call_output"]
    assert "not a JSON object" in json.loads(answers[0])["error"]
    assert (answers[1], rollout.reward, rollout.verdict.unasked) == ("Received.", 0.0, 1)


@pytest.mark.parametrize(
    ("arguments", "schema", "chance"),
    [
        ({}, {}, 0.5),
        ({"city": "Oslo"}, {}, 0.0),
        ({"on": True}, {}, 0.25),
        ({"unit": "C"}, {"properties": {"unit": {"type": "string", "enum": ["C", "F"]}}}, 0.25),
        ({"days": 3}, {}, 0.05),
    ],
)
async def test_the_chance_of_a_ground_truth_is_the_chance_of_guessing_it(
    environment, truth_row, arguments, schema, chance
):
    row = truth_row(("a", arguments))
    row["responses_create_params"]["tools"][0]["parameters"] = schema
    assert (await environment.claims(environment.read(row))).chance == pytest.approx(chance)


async def test_a_weather_row_requires_a_successful_weather_call(play_turns, environment, weather_row):
    rollout = await play_turns(weather_row, [("get_weather", {"city": "sf"})])
    weather = {"city": "sf", "weather_description": "The weather in sf is cold."}
    assert json.loads(rollout.response["output"][1]["output"]) == weather
    assert rollout.reward == 1.0
    assert (await play_turns(weather_row, "It is cold.")).reward == 0.0
    assert (await play_turns(weather_row, [("get_weather", {"town": "sf"})])).reward == 0.0
    assert (await play_turns(weather_row, [("get_weather", {"city": " "})])).reward == 0.0
    assert (await environment.claims(environment.read(weather_row))).chance == 1.0


async def test_the_oracle_solves_a_weather_row(play_with_policy, oracle, weather_row):
    rollout, _ = await play_with_policy(weather_row, oracle)
    assert rollout.reward == 1.0


class CountingList(list):
    """A list that counts how many of its items are read."""

    read = 0

    def __iter__(self):
        for item in super().__iter__():
            self.read += 1
            yield item


async def test_grading_a_weather_row_takes_time_linear_in_its_calls(environment, weather_row):
    episode = await environment.reset(weather_row)
    calls = [
        {"type": "function_call", "name": "get_weather", "arguments": "{}", "call_id": f"c{n}"} for n in range(500)
    ]
    answers = [{"type": "function_call_output", "call_id": call["call_id"], "output": "{}"} for call in calls]
    weather = {"type": "function_call_output", "call_id": "c499", "output": '{"weather_description": "late"}'}
    episode.transcript.items = CountingList([*calls, *answers, weather])
    assert (await environment.verify(episode)).reward == 0.0
    await environment.solve(episode)
    assert episode.transcript.items.read < 10 * len(episode.transcript.items)
    episode.transcript.items[-2:] = [weather]
    assert (await environment.verify(episode)).reward == 1.0


async def test_a_weather_row_without_tools_can_be_graded(environment, weather_row):
    del weather_row["responses_create_params"]["tools"]
    episode = await environment.replay(weather_row, [{"type": "message", "role": "assistant", "content": "Cold."}])
    assert (await environment.verify(episode)).reward == 0.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no `ground_truth` and no `expected`"),
        ({"ground_truth": [], "expected": {"answer": 1}}, "both `expected` and `ground_truth`"),
        ({"expected": {}}, "asks for nothing"),
        (
            {"expected": {"removed": {"notes": [{"title": "a", "text": "b"}]}}},
            "a record that `world.records` does not have",
        ),
        ({"ground_truth": [{"name": "a", "arguments": "{"}]}, "ground_truth.0.arguments"),
        ({"expected": {"answer": 1}, "world": {"today": "tomorrow"}}, "'tomorrow' is no date"),
    ],
)
def test_a_row_that_cannot_be_graded_is_rejected(environment, fields, words):
    row = {"responses_create_params": {"input": "Hi", "tools": [{"type": "function", "name": "other"}]}, **fields}
    with pytest.raises(BadRow, match=words):
        environment.read(row)


def test_a_row_is_unchanged_after_writing_and_reading(generate_row):
    row = generate_row(3)
    assert Request.model_validate(json.loads(json.dumps(row.row()))) == row
