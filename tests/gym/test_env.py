"""An environment as a `gymnasium.Env`."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from gymsdk import Environment, UsageError, load
from gymsdk.errors import BadConfig, BadRow, BrokenEnvironment, UnknownEnvironment, UnknownSplit
from gymsdk.gym.env import Env

from .conftest import HOST, call

Make = Callable[..., Env]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
@pytest.mark.parametrize("name", ["math", "tool_call", "multineedle"])
def test_gymnasiums_env_checker_reports_no_problem(name: str, codec: str, registered: list[str]) -> None:
    with gymnasium.make(f"nemo/{name}", codec=codec, render_mode="ansi") as env:
        check_env(env.unwrapped)


def test_gymnasium_make_accepts_every_argument(registered: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"responses_create_params": {"input": "What is 1 + 1?"}, "question": "1 + 1", "expected_answer": "2"}
    path.write_text(json.dumps(row))
    with gymnasium.make("nemo/math", tasks=str(path), turns=3, codec="chat", settings={"families": ["linear"]}) as env:
        observation, info = env.reset(seed=1)
        assert (observation[0]["content"], info["task_id"]) == ("What is 1 + 1?", "(tasks):0:0")
        assert env.step("\\boxed{2}")[1] == 1.0


def test_an_episode_runs_until_its_verdict(env: Make) -> None:
    counter = env()
    observation, info = counter.reset(seed=7)
    assert [message["role"] for message in observation] == ["user", "user"]
    assert observation[1]["content"] == "Episode 7."
    assert [tool["function"]["name"] for tool in info["tools"]] == ["add", "hang", "doze"]
    assert info["seed"] == 7
    assert set(info) == {"tools", "seed", "task_id"}
    assert counter.rollout is None
    assert counter.episode is not None
    assert counter.episode.seed == 7
    observation, reward, terminated, truncated, info = counter.step(call("add", by=3))
    assert observation == [{"role": "tool", "tool_call_id": "call_0_0", "content": '{"count":3}'}]
    assert (reward, terminated, truncated, info) == (0.0, False, False, {})
    observation, reward, terminated, truncated, info = counter.step("Three.")
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert (info["outcome"], info["ended"], info["reward_components"]) == ("scored", "done", {"count": 1.0})
    assert info["verdict"]["reward"] == 1.0
    assert counter.rollout is not None
    assert (counter.rollout.outcome, counter.rollout.turns, counter.rollout.environment) == ("scored", 2, "host")


def test_the_seed_determines_the_following_episodes(env: Make) -> None:
    one, other = env(), env()
    first = [one.reset(seed=5), one.reset(), one.reset()]
    assert [other.reset(seed=5), other.reset(), other.reset()] == first
    assert len({info["task_id"] for _, info in first}) == len({info["seed"] for _, info in first}) == 3
    assert one.reset(seed=6) != first[0]
    assert one.reset(seed=5) == first[0]


def test_reset_options_select_a_task_by_row_index_or_id_in_any_split(env: Make) -> None:
    counter = env()
    _, info = counter.reset(seed=1)
    assert counter.reset(seed=2, options={"task": info["task_id"]})[1]["task_id"] == info["task_id"]
    assert counter.reset(options={"task": 4, "split": "test"})[1]["task_id"] == "test:0:4"
    assert counter.reset(options={"split": "test"})[1]["task_id"].startswith("test:")
    observation, _ = counter.reset(options={"task": {"responses_create_params": {"input": "Mine."}}})
    assert observation[0]["content"] == "Mine."


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tsk": 1}, UsageError, "did you mean 'task'"),
        ({"task": {"goal": 1}}, BadRow, "does not fit"),
        ({"split": "tests"}, UnknownSplit, "did you mean 'test'"),
        ({"task": "nobody"}, BadRow, "no task with the ID"),
        ({"split": 3}, UsageError, "must be the name of a split, got 3"),
        ({"split": ["train"], "task": 1}, UsageError, r"must be the name of a split, got \['train'\]"),
        ({"split": "", "task": 1}, UnknownSplit, "no split ''"),
        ([], UsageError, r"options of reset must be a dict, as in .* got \[\]"),
    ],
)
def test_invalid_reset_options_are_rejected_and_the_episode_continues(
    env: Make, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    counter = env()
    counter.reset(seed=1)
    with pytest.raises(error, match=message):
        counter.reset(options=options)
    assert counter.step("Three.")[2]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"environment": "mth"}, UnknownEnvironment, "did you mean 'math'"),
        ({"environment": 7}, UsageError, "got int"),
        ({"environment": "math", "splt": "x"}, BadConfig, "splt"),
        ({"environment": "math", "split": "x"}, UnknownSplit, "'x'"),
        ({"environment": "math", "split": 3}, UsageError, "got 3; the splits are train"),
        ({"environment": "math", "settings": [1]}, BadConfig, r"`settings` must be a dict .* got a list"),
        ({"environment": "math", "settings": {1: 2}}, BadConfig, "`settings` must be a dict"),
        ({"environment": "math", "turns": "2"}, UsageError, "turns must be a number, got '2'"),
        ({"environment": "math", "tools": True}, UsageError, "tools must be a number, got True"),
        ({"environment": "math", "codec": 3}, UsageError, "Unknown codec 3; there are chat"),
        ({"environment": "math", "turns": 0}, UsageError, "turns"),
        ({"environment": "math", "seconds": -1.0}, UsageError, "seconds"),
        ({"environment": "math", "codec": "chats"}, UsageError, "did you mean 'chat'"),
        ({"environment": "math", "render_mode": "rgb_array"}, UsageError, "'ansi', 'human'"),
        ({"environment": "math", "families": [], "settings": {"families": []}}, BadConfig, "twice"),
        ({"environment": "math", "tasks": []}, BadRow, "no task"),
    ],
)
def test_invalid_arguments_are_rejected_with_an_explanation(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Env(**given)


def test_settings_for_an_existing_environment_are_rejected() -> None:
    with pytest.raises(BadConfig, match="has its settings already"):
        Env(load("math"), families=[])


def test_a_reset_searches_for_a_task_within_a_limit() -> None:
    endless = Env("multineedle", seconds=0.05)
    with pytest.raises(BadRow, match="the index 99999999999 exceeds the largest"):
        endless.reset(options={"task": 99_999_999_999})
    with pytest.raises(UsageError, match=r"not found within 0\.05 s"):
        endless.reset(options={"task": 99_999})
    assert endless.reset(options={"task": 0})[1]["task_id"] == "train:0:0"
    endless.close()


def test_settings_whose_names_clash_with_arguments_go_into_the_settings_dict(installed: Any) -> None:
    installed("host", "from gymsdk import *\nfrom typing import *\nimport asyncio\n" + HOST)
    env = Env("host", settings={"environment": "mine"}, goal=5, judge="scripted/null")
    config: Any = env._config.environment.config
    assert (config.environment, config.goal, config.judge is not None) == ("mine", 5, True)
    env.close()


@pytest.mark.parametrize(("stage", "kind"), [("reset", "hook_raised"), ("verify", "judge_failed")])
def test_a_failure_gives_nan_and_truncates_the_episode(env: Make, host: ModuleType, stage: str, kind: str) -> None:
    counter = env(settings={"breaks": stage})
    observation, info = counter.reset(seed=1)
    if stage == "reset":
        assert (observation, info["tools"]) == ([], [])
        assert "cannot open" in info["failure"]["message"]
    observation, reward, terminated, truncated, info = counter.step("Three.")
    assert (observation, isnan(reward), terminated, truncated) == ([], True, False, True)
    assert (info["failure"]["kind"], info["failure"]["stage"]) == (kind, stage)
    assert "verdict" not in info
    assert host.log.count("opened") == host.log.count("closed")
    with pytest.raises(ResetNeeded):
        counter.step("Again.")


def test_an_invalid_action_uses_no_turn(env: Make) -> None:
    counter = env(turns=1)
    counter.reset(seed=1)
    for _ in range(3):
        with pytest.raises(UsageError, match="got int"):
            counter.step(7)
    assert counter.step("Three.")[2]


def test_the_budgets_of_turns_and_tools_truncate_the_episode_and_keep_the_verdict(env: Make) -> None:
    counter = env(turns=2)
    counter.reset(seed=1)
    counter.step(call("add", by=2))
    observation, reward, terminated, truncated, info = counter.step(call("add", by=1))
    assert (reward, terminated, truncated, info["ended"]) == (1.0, False, True, "turns")
    assert observation[0]["content"] == '{"count":3}'
    counter = env(tools=1)
    counter.reset(seed=1)
    observation, _, terminated, truncated, info = counter.step({"tool_calls": call("add", by=1)["tool_calls"] * 2})
    assert (terminated, truncated, info["ended"]) == (False, True, "tools")
    assert [message["content"][:8] for message in observation] == ['{"count"', '{"error"']


@pytest.mark.parametrize("tool", ["hang", "doze"])
def test_a_hanging_tool_is_stopped(env: Make, tool: str) -> None:
    counter = env(seconds=0.2)
    counter.reset(seed=1)
    *_, truncated, info = counter.step(call(tool))
    assert truncated
    assert info["failure"]["kind"] == "tool_timeout"


def test_observations_and_infos_are_copies(env: Make) -> None:
    counter = env()
    observation, info = counter.reset(seed=1)
    opening, tools = json.dumps(observation), json.dumps(info["tools"])
    observation[0]["content"] = "changed"
    info["tools"][0]["function"]["parameters"]["properties"].clear()
    again = counter.reset(seed=1)
    assert (json.dumps(again[0]), json.dumps(again[1]["tools"])) == (opening, tools)


def test_a_step_requires_a_reset(env: Make) -> None:
    counter = env()
    for prepare in (lambda: None, lambda: (counter.reset(seed=1), counter.step("Three.")), counter.close):
        prepare()
        with pytest.raises(ResetNeeded, match=r"call reset\(\)"):
            counter.step("Three.")


def test_the_lifespan_contains_all_episodes_and_each_is_closed_once(env: Make, host: ModuleType) -> None:
    counter = env()
    counter.reset(seed=1)
    counter.reset(seed=2)
    counter.step("Three.")
    counter.reset(seed=3)
    counter.close()
    counter.close()
    assert host.log == ["entered", *["opened", "closed"] * 3, "left"]
    counter.reset(seed=4)
    assert host.log[-2:] == ["entered", "opened"]


def test_a_failing_lifespan_is_reported(env: Make) -> None:
    with pytest.raises(BrokenEnvironment, match="no index"):
        env(settings={"breaks": "lifespan"}).reset(seed=1)


def test_step_rewards_are_returned_at_once(environment: Callable[..., Environment]) -> None:
    source = """
@hookimpl
def step(action, transcript):
    return Step(messages=["More."], reward=0.25, done=len(transcript.calls()) > 9 or action.text == "stop")
"""
    with Env(environment(source), tasks=[{"responses_create_params": {"input": "?"}}]) as env:
        env.reset(seed=1)
        rewards = [env.step(text)[1] for text in ("a", "b", "stop")]
        assert rewards == [0.25, 0.25, 0.25]
        assert env.rollout is not None
        assert env.rollout.reward == sum(rewards)
