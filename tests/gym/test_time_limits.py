"""What bounds an episode from outside: Gymnasium's limits on its steps, and the seconds of each step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import isnan
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from gymsdk import Environment, ToolCall, Verdict, hookimpl
from gymsdk.errors import UsageError
from gymsdk.gym.env import Env
from gymsdk.gym.policy import Policy, rollout
from gymsdk.gym.registration import register
from gymsdk.gym.vector import VectorEnv
from gymsdk.models.scripted import ScriptedModel

ROWS = [{"responses_create_params": {"input": "note"}}]

NOTES = """
from typing import Literal
from gymsdk import Task, Verdict, hookimpl

def note() -> str:
    return "noted"

@hookimpl
def tools():
    return [note]

@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("note")

@hookimpl
def verify(transcript):
    return Verdict(reward=float(len(transcript.calls("note"))))
"""


class Notes:
    """An environment that pays for each note; one that it is told to doze over takes longer than anybody waits."""

    @hookimpl
    def tools(self) -> list[Callable[..., Any]]:
        def note() -> str:
            return "noted"

        async def doze() -> None:
            await asyncio.sleep(60)

        return [note, doze]

    @hookimpl
    def verify(self, transcript: Any) -> Verdict:
        return Verdict(reward=float(len(transcript.calls("note"))))

    @hookimpl
    def solve(self) -> list[ToolCall]:
        return [ToolCall(name="note")]


NOTE, DOZE = ([{"type": "function_call", "name": name, "arguments": "{}"}] for name in ("note", "doze"))


@pytest.fixture
def env() -> Iterator[Env]:
    made = Env(Environment("notes", Notes()), tasks=ROWS)
    yield made
    made.close()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("outermost", [True, False])
def test_the_last_step_that_a_time_limit_allows_brings_the_verdict(
    env: Env, steps: int, outermost: bool
) -> None:  # a case of the test
    limited: Any = TimeLimit(env, steps) if outermost else RecordEpisodeStatistics(TimeLimit(env, steps))
    for _ in range(2):
        limited.reset()
        for _ in range(steps - 1):
            assert limited.step(NOTE)[1:4] == (0.0, False, False)
        _, reward, terminated, truncated, info = limited.step(NOTE)
        assert (reward, terminated, truncated) == (steps, False, True)
        assert (info["outcome"], info["ended"], info["verdict"]["reward"]) == ("scored", "turns", steps)


def test_the_environment_itself_has_no_limit_without_the_wrapper(env: Env) -> None:
    TimeLimit(env, 1)
    env.reset()
    assert env.step(NOTE)[1:4] == (0.0, False, False)


def test_an_unscorable_episode_at_a_time_limit_has_no_number() -> None:
    class Broken(Notes):
        @hookimpl
        def verify(self) -> Verdict:
            raise ValueError("no gold")

    limited = TimeLimit(Env(Environment("broken", Broken()), tasks=ROWS), 1)
    limited.reset()
    _, reward, _, truncated, info = limited.step(NOTE)
    limited.close()
    assert (isnan(reward), truncated, info["failure"]["kind"]) == (True, True, "hook_raised")


def test_make_and_make_vec_bound_the_steps_of_an_episode_that_is_judged(installed: Callable[..., Any]) -> None:
    installed("noted", NOTES)
    register()
    env = gymnasium.make("nemo/noted", max_episode_steps=2)
    env.reset()
    assert env.step(NOTE)[1:4] == (0.0, False, False)
    assert env.step(NOTE)[1:4] == (2.0, False, True)
    env.close()
    for mode in ("vector_entry_point", "sync"):
        many = gymnasium.make_vec("nemo/noted", num_envs=2, max_episode_steps=1, vectorization_mode=mode)
        many.reset()
        _, rewards, _, truncated, _ = many.step([NOTE, NOTE])
        assert (rewards.tolist(), truncated.tolist()) == ([1.0, 1.0], [True, True])
        many.close()


@pytest.mark.parametrize("steps", [0, True, "3"])
def test_a_limit_of_a_vector_that_makes_no_sense_is_refused(steps: Any) -> None:
    with pytest.raises(UsageError, match="max_episode_steps must be a positive integer"):
        VectorEnv(Environment("notes", Notes()), tasks=ROWS, max_episode_steps=steps)


def test_a_rollout_under_a_time_limit_is_judged(env: Env, policy: Callable[..., ScriptedModel]) -> None:
    played = rollout(TimeLimit(env, 2), policy(NOTE))
    assert (played.outcome, played.ended, played.reward) == ("scored", "turns", 2.0)


def test_a_seat_that_hangs_to_its_deadline_leaves_its_neighbours_their_solution() -> None:
    env = VectorEnv(Environment("notes", Notes()), num_envs=3, tasks=ROWS, seconds=0.4, turns=3)
    oracle = Policy("scripted/oracle", env)
    observations, infos = env.reset()
    oracle.batch(observations, infos)
    observations, rewards, _, truncated, infos = env.step([NOTE, DOZE, NOTE])
    assert (isnan(rewards[1]), truncated.tolist()) == (True, [False, True, False])
    turns = oracle.batch(observations, infos)
    assert [turn.failure for turn in turns] == [None] * 3
    assert [len(turn) for turn in turns] == [1, 0, 1]
    env.close()


def test_a_policy_may_think_longer_than_a_step_may_take() -> None:
    env = Env(Environment("notes", Notes()), tasks=ROWS, seconds=0.05)
    oracle = Policy("scripted/oracle", env)
    observation, info = env.reset()
    assert env.episode is not None
    # Between two turns no deadline runs, however long the policy takes.
    assert env.episode.deadline is None
    observation, *_, info = env.step(oracle(observation, info))
    assert env.episode.deadline is None
    assert len(oracle(observation, info)) == 1
    env.close()
