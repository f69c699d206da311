"""Replay an episode from its items, as for a request without a session."""

from __future__ import annotations

import time

import pytest
from pydantic import Field

from gymsdk import Environment, Failed, Message, Reset, State, Verdict, hookimpl, responses


def bump(state: Count, by: int = 1) -> int:
    state.steps += by
    return state.steps


class Count(State):
    steps: int = 0
    seen: list[str] = Field(default_factory=list)


class Counting:
    """An environment with a state that records the arguments of its tools."""

    def __init__(self) -> None:
        self.closed = 0

    @hookimpl
    def reset(self, seed):
        return Reset(state=Count(steps=seed))

    @hookimpl
    def step(self, state, action, transcript):
        state.seen.append(f"{len(transcript.items)} {getattr(action, 'name', 'reply')}")
        if isinstance(action, Message) and action.text == "boom":
            raise ValueError("boom")

    @hookimpl
    def tools(self):
        return [bump]

    @hookimpl
    def verify(self, state):
        return Verdict(reward=float(state.steps))

    @hookimpl
    def close(self):
        self.closed += 1


TURNS = [
    responses.build_function_call("bump", {"by": 2}, "a"),
    responses.build_function_call("bump", {}, "b"),
    responses.build_function_call_output("a", "7"),
    responses.build_function_call_output("b", "8"),
    responses.build_function_call("bump", {}, "c"),
    responses.build_function_call_output("c", "9"),
    responses.build_message("42"),
]


async def test_replay_rebuilds_the_state_by_playing_the_actions_again(task):
    environment = Environment("counting", Counting())
    episode = await environment.replay(task, TURNS, seed=5)
    assert await environment.verify(episode) == Verdict(reward=9.0)
    assert episode.state.seen == ["2 bump", "2 bump", "5 bump", "7 reply"]
    assert episode.done
    assert episode.transcript.items == TURNS


async def test_replay_skips_calls_that_were_not_run(task):
    environment = Environment("counting", Counting())
    not_run = [*TURNS[:3], responses.build_function_call_output("b", '{"error":"not run: the episode is over"}')]
    assert (await environment.replay(task, not_run)).state.steps == 2


async def test_a_failed_replay_closes_the_episode(task):
    plugin = Counting()
    with pytest.raises(Failed, match="hook 'step' of environment 'counting' raised ValueError: boom"):
        await Environment("counting", plugin).replay(task, [responses.build_message("boom")])
    assert plugin.closed == 1


async def test_replay_without_calls_plays_only_the_replies(task):
    environment = Environment("counting", Counting())
    episode = await environment.reset(task, seed=5)
    await environment.replay_into(episode, TURNS, calls=False)
    assert (episode.state.seen, episode.done, episode.transcript.items) == (["7 reply"], True, TURNS)


@pytest.mark.parametrize("are_equal", [True, False])
async def test_the_steps_of_many_calls_are_put_into_another_order_in_linear_time(task, are_equal):
    numbers = range(8000)
    calls = [responses.build_function_call("bump", {"by": number}, str(number)) for number in numbers]
    outputs = [responses.build_function_call_output(str(number), "1") for number in numbers]
    turns = [[call, output] for call, output in zip(calls, outputs, strict=True)]
    environment = Environment("counting", Counting())
    episode = await environment.reset(task, seed=5)
    episode.transcript.items = [item for turn in turns for item in turn]
    episode.record.step_rewards = [float(number) for number in numbers]
    # An agent has added a default, which is nested too deeply to be compared.
    added = '{"a":' + "[" * 900 + "]" * 900 + "}"
    told = turns[::-1] if are_equal else [[call | {"arguments": added}, output] for call, output in turns[:100]]
    started = time.process_time()
    await environment.replay_into(episode, [item for turn in told for item in turn], calls=False)
    assert time.process_time() - started < 2
    assert episode.record.step_rewards == ([*numbers][::-1] if are_equal else [*numbers])


@pytest.mark.parametrize(
    ("source", "needs_replay"),
    [
        ("@hookimpl\nasync def verify(transcript): return Verdict(reward=0)", False),
        ("@hookimpl\nasync def verify(state): return Verdict(reward=0)", True),
        ("@hookimpl\nasync def verify(): return Verdict(reward=0)\n@hookimpl\nasync def step(): return None", True),
        ("@hookimpl\nasync def step(): return Step(reward=1)", True),
    ],
)
def test_needs_replay_depends_on_state_and_steps(environment, source, needs_replay):
    assert environment(source).needs_replay is needs_replay
