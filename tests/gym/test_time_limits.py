"""Limits on an episode: Gymnasium's limit on steps, and the seconds of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isnan
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from sums_environment import PLAIN

from gymsdk import Environment
from gymsdk.errors import UsageError
from gymsdk.gym.env import Env
from gymsdk.gym.policy import Policy, rollout
from gymsdk.gym.registration import register
from gymsdk.gym.vector import VectorEnv, get_info
from gymsdk.models.scripted import ScriptedModel

ROWS = [{"responses_create_params": {"input": "note"}}]

NOTES = f"""{PLAIN}
def note() -> str:
    return "noted"

async def doze() -> None:
    await asyncio.sleep(60)

@hookimpl
def tools():
    return [note, doze]

@hookimpl
def verify(transcript):
    return Verdict(reward=float(len(transcript.calls("note"))))

@hookimpl
def solve():
    return [ToolCall(name="note")]
"""
"""An environment that gives a reward for each note; its tool `doze` sleeps longer than any deadline here."""

NOTE, DOZE = ([{"type": "function_call", "name": name, "arguments": "{}"}] for name in ("note", "doze"))


@pytest.fixture
def notes(environment: Callable[..., Environment]) -> Environment:
    return environment(NOTES)


@pytest.fixture
def env(notes: Environment) -> Iterator[Env]:
    env = Env(notes, tasks=ROWS)
    yield env
    env.close()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("outermost", [True, False])
def test_the_last_step_allowed_by_a_time_limit_returns_the_verdict(env: Env, steps: int, outermost: bool) -> None:
    limited: Any = TimeLimit(env, steps) if outermost else RecordEpisodeStatistics(TimeLimit(env, steps))
    for _ in range(2):
        limited.reset()
        for _ in range(steps - 1):
            assert limited.step(NOTE)[1:4] == (0.0, False, False)
        _, reward, terminated, truncated, info = limited.step(NOTE)
        assert (reward, terminated, truncated) == (steps, False, True)
        assert (info["outcome"], info["ended"], info["verdict"]["reward"]) == ("scored", "turns", steps)


def test_a_discarded_time_limit_wrapper_sets_no_limit(env: Env) -> None:
    TimeLimit(env, 1)
    env.reset()
    assert env.step(NOTE)[1:4] == (0.0, False, False)


def test_an_unscorable_episode_at_a_time_limit_has_a_nan_reward(environment: Callable[..., Environment]) -> None:
    broken = f"{NOTES}\n@hookimpl\ndef verify():\n    raise ValueError('no gold')\n"
    limited = TimeLimit(Env(environment(broken), tasks=ROWS), 1)
    limited.reset()
    _, reward, _, truncated, info = limited.step(NOTE)
    limited.close()
    assert (isnan(reward), truncated, info["failure"]["kind"]) == (True, True, "hook_raised")


def test_make_and_make_vec_limit_the_steps_and_return_the_verdict(installed: Callable[..., Any]) -> None:
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
def test_an_invalid_step_limit_of_a_vector_is_rejected(notes: Environment, steps: Any) -> None:
    with pytest.raises(UsageError, match="max_episode_steps must be a positive integer"):
        VectorEnv(notes, tasks=ROWS, max_episode_steps=steps)


def test_a_rollout_under_a_time_limit_is_judged(env: Env, policy: Callable[..., ScriptedModel]) -> None:
    result = rollout(TimeLimit(env, 2), policy(NOTE))
    assert (result.outcome, result.ended, result.reward) == ("scored", "turns", 2.0)


def test_a_slot_that_reaches_its_deadline_does_not_affect_the_others(notes: Environment) -> None:
    env = VectorEnv(notes, num_envs=3, tasks=ROWS, seconds=0.4, turns=3)
    oracle = Policy("scripted/oracle", env)
    observations, infos = env.reset()
    oracle.batch(observations, infos)
    observations, rewards, _, truncated, infos = env.step([NOTE, DOZE, NOTE])
    assert (isnan(rewards[1]), truncated.tolist()) == (True, [False, True, False])
    assert get_info(infos, 1)["failure"]["kind"] == "tool_timeout"
    turns = oracle.batch(observations, infos)
    assert [turn.failure for turn in turns] == [None] * 3
    assert [len(turn) for turn in turns] == [1, 0, 1]
    env.close()


def test_a_policy_may_take_longer_than_a_step(notes: Environment) -> None:
    env = Env(notes, tasks=ROWS, seconds=0.05)
    oracle = Policy("scripted/oracle", env)
    observation, info = env.reset()
    assert env.episode is not None
    # No deadline runs between two turns, however long the policy takes.
    assert env.episode.deadline is None
    observation, *_, info = env.step(oracle(observation, info))
    assert env.episode.deadline is None
    assert len(oracle(observation, info)) == 1
    env.close()
