"""Properties of all generated requests."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gym_env_tool_call.rows import referenced_calls
from gym_env_tool_call.world import count_facts
from gymsdk import Message, ToolCall

seeds = st.integers(min_value=0, max_value=10**6)
property_settings = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow
@property_settings
@given(seed=seeds)
async def test_the_oracle_solves_any_request(environment, play_with_policy, oracle, generate_row, seed):
    rollout, state = await play_with_policy(generate_row(seed), oracle)
    assert (rollout.reward, rollout.ended) == (1.0, "done")
    task = environment.read(rollout.row)
    assert count_facts(state) == count_facts(task.world.records) - count_facts(task.expected.removed) + count_facts(
        task.expected.added
    )


@pytest.mark.slow
@property_settings
@given(seed=seeds, data=st.data())
async def test_omitting_any_call_lowers_the_reward(play_with_policy, oracle, generate_row, seed, data):
    row = generate_row(seed)
    assume(row.plan.calls)
    missing = data.draw(st.integers(min_value=0, max_value=len(row.plan.calls) - 1))

    async def choose(episode):
        made = len(episode.transcript.calls())
        moves = await oracle(episode)
        return [
            _with_invalid_arguments(move) if made + number == missing else move for number, move in enumerate(moves)
        ]

    rollout, _ = await play_with_policy(row, choose)
    assert rollout.reward < 1.0


def _with_invalid_arguments(move):
    return ToolCall(name=move.name, arguments='{"nothing": "of use"}')


@pytest.mark.slow
@property_settings
@given(seed=seeds, data=st.data())
async def test_any_unrequested_change_lowers_the_reward(play_with_policy, oracle, generate_row, seed, data):
    row = generate_row(seed)
    harm = data.draw(st.sampled_from(_unrequested_calls(row)))

    async def choose(episode):
        moves = await oracle(episode)
        done = any(isinstance(move, Message) for move in moves)
        return [harm] if done and not _was_called(episode, harm) else moves

    rollout, _ = await play_with_policy(row, choose)
    assert "error" not in json.loads(rollout.response["output"][-2]["output"])
    assert rollout.reward <= 0.5
    assert rollout.components["harm"] < 0.0


def _unrequested_calls(row):
    date, phone = row.world.today, row.world.contacts[0].phone
    kept = [event for event in row.world.records.events if event not in row.expected.removed.events]
    deleted = {note.title for note in row.expected.removed.notes}
    note = next(note for note in row.world.records.notes if note.title not in deleted)
    calls = {
        "send_message": {"to": phone, "text": "Never mind"},
        "write_note": {"title": "Diary", "text": "Dear diary"},
        "delete_note": {"title": note.title},
        "add_reminder": {"text": "sleep", "date": date, "time": "23:00"},
        "create_event": {"title": "Nap", "date": date, "start": "05:00", "minutes": 5},
        "cancel_event": {"event_id": kept[0].id},
        "move_event": {"event_id": kept[0].id, "date": date, "start": "03:00"},
    }
    return [ToolCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls.items()]


def _was_called(episode, call):
    return any(
        (recorded.name, recorded.arguments) == (call.name, call.arguments) for recorded in episode.transcript.calls()
    )


@pytest.mark.slow
@property_settings
@given(seed=seeds)
async def test_replaying_the_calls_rebuilds_state_and_verdict(
    environment, play_with_policy, oracle, generate_row, seed
):
    rollout, state = await play_with_policy(json.loads(generate_row(seed).model_dump_json()), oracle)
    replayed = await environment.replay(json.loads(json.dumps(rollout.row)), rollout.response["output"])
    assert replayed.state == state
    assert await environment.verify(replayed) == rollout.verdict


@property_settings
@given(seed=seeds)
def test_a_plan_uses_the_output_of_every_lookup(generate_row, seed):
    plan = generate_row(seed).plan
    looks = ("get_", "find_", "list_", "convert_")
    used = referenced_calls([[call.arguments for call in plan.calls], plan.answer])
    assert all(number in used for number, call in enumerate(plan.calls) if call.name.startswith(looks))
