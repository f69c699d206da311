"""What holds of every generated request."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gym_env_tool_call.records import facts
from gym_env_tool_call.references import needs
from gymsdk import Message, ToolCall

seeds = st.integers(min_value=0, max_value=10**6)
often = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@often
@given(seed=seeds)
async def test_solving_any_request_earns_everything(environment, played, oracle, generated, seed):
    rollout, state = await played(generated(seed), oracle)
    assert (rollout.reward, rollout.ended) == (1.0, "done")
    task = environment.read(rollout.row)
    assert facts(state) == facts(task.world.records) - facts(task.expected.removed) + facts(task.expected.added)


@often
@given(seed=seeds, data=st.data())
async def test_without_any_one_call_less_is_earned(played, oracle, generated, seed, data):
    row = generated(seed)
    assume(row.plan.calls)
    missing = data.draw(st.integers(min_value=0, max_value=len(row.plan.calls) - 1))

    async def choose(episode):
        made = len(episode.transcript.calls())
        moves = await oracle(episode)
        return [_spoilt(move) if made + number == missing else move for number, move in enumerate(moves)]

    rollout, _ = await played(row, choose)
    assert rollout.reward < 1.0


def _spoilt(move):
    return ToolCall(name=move.name, arguments='{"nothing": "of use"}')


@often
@given(seed=seeds, data=st.data())
async def test_any_change_besides_costs(played, oracle, generated, seed, data):
    row = generated(seed)
    harm = data.draw(st.sampled_from(_harms(row)))

    async def choose(episode):
        moves = await oracle(episode)
        done = any(isinstance(move, Message) for move in moves)
        return [harm] if done and not _made(episode, harm) else moves

    rollout, _ = await played(row, choose)
    assert "error" not in json.loads(rollout.response["output"][-2]["output"])
    assert rollout.reward <= 0.5
    assert rollout.components["harm"] < 0.0


def _harms(row):
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


def _made(episode, call):
    return any((each.name, each.arguments) == (call.name, call.arguments) for each in episode.transcript.calls())


@often
@given(seed=seeds)
async def test_replaying_the_calls_rebuilds_state_and_verdict(environment, played, oracle, generated, seed):
    rollout, state = await played(json.loads(generated(seed).model_dump_json()), oracle)
    replayed = await environment.replay(json.loads(json.dumps(rollout.row)), rollout.response["output"])
    assert replayed.state == state
    assert await environment.verify(replayed) == rollout.verdict


@often
@given(seed=seeds)
def test_what_a_plan_looks_up_is_put_to_use(generated, seed):
    plan = generated(seed).plan
    looks = ("get_", "find_", "list_", "convert_")
    used = needs([[call.arguments for call in plan.calls], plan.answer])
    assert all(number in used for number, call in enumerate(plan.calls) if call.name.startswith(looks))
