"""An environment as a `gymnasium.Env`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
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

from .conftest import call

Make = Callable[..., Env]


@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
@pytest.mark.parametrize("name", ["math", "tool_call", "multineedle"])
def test_gymnasiums_checker_finds_nothing(name: str, codec: str, registered: list[str]) -> None:
    with gymnasium.make(f"nemo/{name}", codec=codec, render_mode="ansi") as env:
        check_env(env.unwrapped)


def test_gymnasium_makes_it_with_every_argument(registered: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"responses_create_params": {"input": "What is 1 + 1?"}, "question": "1 + 1", "expected_answer": "2"}
    path.write_text(json.dumps(row))
    with gymnasium.make("nemo/math", tasks=str(path), turns=3, codec="chat", settings={"families": ["linear"]}) as env:
        seen, info = env.reset(seed=1)
        assert (seen[0]["content"], info["task_id"]) == ("What is 1 + 1?", "(tasks):0:0")
        assert env.step("\\boxed{2}")[1] == 1.0


def test_an_episode_is_played_to_its_verdict(env: Make) -> None:
    counting = env()
    seen, info = counting.reset(seed=7)
    assert [message["role"] for message in seen] == ["user", "user"]
    assert seen[1]["content"] == "Episode 7."
    assert [tool["function"]["name"] for tool in info["tools"]] == ["add", "hang", "doze"]
    assert info["seed"] == 7
    assert set(info) == {"tools", "seed", "task_id"}
    seen, reward, terminated, truncated, info = counting.step(call("add", by=3))
    assert seen == [{"role": "tool", "tool_call_id": "call_0_0", "content": '{"count":3}'}]
    assert (reward, terminated, truncated, info) == (0.0, False, False, {})
    seen, reward, terminated, truncated, info = counting.step("Three.")
    assert (seen, reward, terminated, truncated) == ([], 1.0, True, False)
    assert (info["outcome"], info["ended"], info["reward_components"]) == ("scored", "done", {"count": 1.0})
    assert info["verdict"]["reward"] == 1.0


def test_the_finished_rollout_is_at_hand(env: Make) -> None:
    counting = env()
    counting.reset(seed=7)
    assert counting.rollout is None
    assert counting.episode is not None
    assert counting.episode.seed == 7
    counting.step("Three.")
    assert counting.rollout is not None
    assert (counting.rollout.outcome, counting.rollout.turns, counting.rollout.environment) == ("scored", 1, "host")


def test_the_seed_decides_the_episodes_that_follow(env: Make) -> None:
    one, other = env(), env()
    first = [one.reset(seed=5), one.reset(), one.reset()]
    assert [other.reset(seed=5), other.reset(), other.reset()] == first
    assert len({info["task_id"] for _, info in first}) == 3
    assert one.reset(seed=6) != first[0]
    assert one.reset(seed=5) == first[0]


def test_a_task_is_named_by_row_number_or_id_in_any_split(env: Make) -> None:
    counting = env()
    _, info = counting.reset(seed=1)
    assert counting.reset(seed=2, options={"task": info["task_id"]})[1]["task_id"] == info["task_id"]
    assert counting.reset(options={"task": 4, "split": "test"})[1]["task_id"] == "test:0:4"
    assert counting.reset(options={"split": "test"})[1]["task_id"].startswith("test:")
    seen, _ = counting.reset(options={"task": {"responses_create_params": {"input": "Mine."}}})
    assert seen[0]["content"] == "Mine."


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
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
def test_options_that_are_wrong_are_told_and_the_episode_goes_on(
    env: Make, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    counting = env()
    counting.reset(seed=1)
    with pytest.raises(error, match=sentence):
        counting.reset(options=options)
    assert counting.step("Three.")[2]


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"environment": "mth"}, UnknownEnvironment, "did you mean 'math'"),
        ({"environment": 7}, UsageError, "got int"),
        ({"environment": "math", "splt": "x"}, BadConfig, "splt"),
        ({"environment": "math", "split": "x"}, UnknownSplit, "'x'"),
        ({"environment": "math", "split": 3}, UsageError, "got 3; the splits are train"),
        ({"environment": "math", "settings": [1]}, BadConfig, r"`settings` must be a dict .* got \[1\]"),
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
def test_arguments_that_are_wrong_are_told_in_a_sentence(
    given: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Env(**given)


def test_a_reset_does_not_look_for_a_task_without_end() -> None:
    endless = Env("multineedle", seconds=0.05)
    with pytest.raises(BadRow, match="the index 99999999999 exceeds the largest"):
        endless.reset(options={"task": 99_999_999_999})
    with pytest.raises(UsageError, match=r"not found within 0\.05 s"):
        endless.reset(options={"task": 99_999})
    assert endless.reset(options={"task": 0})[1]["task_id"] == "train:0:0"
    endless.close()


def test_a_closed_environment_may_be_reset_again(env: Make, host: ModuleType) -> None:
    counting = env()
    counting.reset(seed=1)
    counting.close()
    assert counting.reset(seed=1)[1]["task_id"]
    assert host.log == ["entered", "opened", "closed", "left", "entered", "opened"]


def test_settings_that_clash_with_an_argument_have_a_place_of_their_own(installed: Any) -> None:
    from .conftest import HOST

    installed("host", "from gymsdk import *\nfrom typing import *\nimport asyncio\n" + HOST)
    env = Env("host", settings={"environment": "mine"}, goal=5, judge="scripted/null")
    config: Any = env._config.environment.config
    assert (config.environment, config.goal, config.judge is not None) == ("mine", 5, True)
    env.close()


def test_settings_of_an_environment_that_is_made_belong_there() -> None:
    with pytest.raises(BadConfig, match="has its settings already"):
        Env(load("math"), families=[])


@pytest.mark.parametrize(("stage", "kind"), [("reset", "hook_raised"), ("verify", "judge_failed")])
def test_a_failure_is_nan_truncated_and_told(env: Make, host: ModuleType, stage: str, kind: str) -> None:
    counting = env(settings={"breaks": stage})
    counting.reset(seed=1)
    seen, reward, terminated, truncated, info = counting.step("Three.")
    assert (seen, isnan(reward), terminated, truncated) == ([], True, False, True)
    assert (info["failure"]["kind"], info["failure"]["stage"]) == (kind, stage)
    assert "verdict" not in info
    assert host.log.count("opened") == host.log.count("closed")
    with pytest.raises(ResetNeeded):
        counting.step("Again.")


def test_a_reset_that_fails_shows_nothing_and_says_why(env: Make) -> None:
    counting = env(settings={"breaks": "reset"})
    seen, info = counting.reset(seed=1)
    assert (seen, info["tools"]) == ([], [])
    assert "cannot open" in info["failure"]["message"]


def test_an_action_that_is_none_costs_no_turn(env: Make) -> None:
    counting = env(turns=1)
    counting.reset(seed=1)
    for _ in range(3):
        with pytest.raises(UsageError, match="got int"):
            counting.step(7)
    assert counting.step("Three.")[2]


def test_the_turn_budget_truncates_and_the_verdict_stands(env: Make) -> None:
    counting = env(turns=2)
    counting.reset(seed=1)
    counting.step(call("add", by=2))
    seen, reward, terminated, truncated, info = counting.step(call("add", by=1))
    assert (reward, terminated, truncated, info["ended"]) == (1.0, False, True, "turns")
    assert seen[0]["content"] == '{"count":3}'


def test_the_tool_budget_truncates_too(env: Make) -> None:
    counting = env(tools=1)
    counting.reset(seed=1)
    both = call("add", by=1)["tool_calls"] * 2
    seen, _, terminated, truncated, info = counting.step({"tool_calls": both})
    assert (terminated, truncated, info["ended"]) == (False, True, "tools")
    assert [message["content"][:8] for message in seen] == ['{"count"', '{"error"']


@pytest.mark.parametrize("tool", ["hang", "doze"])
def test_a_tool_that_hangs_is_bounded(env: Make, tool: str) -> None:
    counting = env(seconds=0.2)
    counting.reset(seed=1)
    *_, truncated, info = counting.step(call(tool))
    assert truncated
    assert info["failure"]["kind"] == "tool_timeout"


def test_what_was_given_out_is_nobody_elses(env: Make) -> None:
    counting = env()
    seen, info = counting.reset(seed=1)
    opening, tools = json.dumps(seen), json.dumps(info["tools"])
    seen[0]["content"] = "changed"
    info["tools"][0]["function"]["parameters"]["properties"].clear()
    again = counting.reset(seed=1)
    assert (json.dumps(again[0]), json.dumps(again[1]["tools"])) == (opening, tools)


def test_nothing_of_the_row_is_in_what_the_policy_gets(registered: list[str]) -> None:
    with gymnasium.make("nemo/math") as env:
        _, info = env.reset(seed=1)
        assert set(info) == {"tools", "seed", "task_id"}


def test_a_step_wants_a_reset_first(env: Make) -> None:
    counting = env()
    for begun in (lambda: None, lambda: (counting.reset(seed=1), counting.step("Three.")), counting.close):
        begun()
        with pytest.raises(ResetNeeded, match=r"call reset\(\)"):
            counting.step("Three.")


def test_the_lifespan_spans_the_episodes_and_each_is_closed_once(env: Make, host: ModuleType) -> None:
    counting = env()
    counting.reset(seed=1)
    counting.reset(seed=2)
    counting.step("Three.")
    counting.reset(seed=3)
    counting.close()
    counting.close()
    assert host.log == ["entered", *["opened", "closed"] * 3, "left"]
    counting.reset(seed=4)
    assert host.log[-2:] == ["entered", "opened"]


def test_a_lifespan_that_breaks_is_told(env: Make) -> None:
    with pytest.raises(BrokenEnvironment, match="no index"):
        env(settings={"breaks": "lifespan"}).reset(seed=1)


async def test_it_works_beside_a_running_loop(env: Make) -> None:
    counting = env()
    counting.reset(seed=1)
    await asyncio.sleep(0)
    assert counting.step("Three.")[2]


def test_steps_that_pay_are_paid_at_once(environment: Callable[..., Environment]) -> None:
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


def test_resets_draw_different_episode_seeds(env: Make) -> None:
    counting = env()
    seeds = [counting.reset()[1]["seed"] for _ in range(4)]
    assert all(one != other for one, other in pairwise(seeds))
