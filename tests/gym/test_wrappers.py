"""Gymnasium's own wrappers and vectors around an environment."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit, TransformReward

from gymsdk.gym.env import Env

from .conftest import call

# Since Python 3.12 a fork beside a thread gives a warning; Gymnasium's asynchronous vector forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

Make = Callable[..., Env]

ROW = {"responses_create_params": {"input": "What is 1 + 1? 你好 👩‍💻"}, "question": "1 + 1", "expected_answer": "2"}


def test_a_time_limit_above_the_turn_budget_changes_nothing(env: Make) -> None:
    counter = TimeLimit(env(turns=1), 5)
    counter.reset(seed=1)
    *_, truncated, info = counter.step(call("add", by=3))
    assert (truncated, info["verdict"]["reward"]) == (True, 1.0)


def test_wrappers_of_gymnasium_work_around_an_environment(env: Make) -> None:
    counter = RecordEpisodeStatistics(
        TransformReward(OrderEnforcing(PassiveEnvChecker(env())), lambda reward: 2 * reward)
    )
    with pytest.raises(ResetNeeded):
        counter.step("Three.")
    counter.reset(seed=1)
    counter.step(call("add", by=3))
    _, reward, terminated, _, info = counter.step("Three.")
    assert (reward, terminated, info["episode"]["r"], info["episode"]["l"]) == (2.0, True, 2.0, 2)


def test_the_nan_of_a_failure_is_in_the_statistics_and_the_passive_checker_warns_about_it(env: Make) -> None:
    counter = RecordEpisodeStatistics(PassiveEnvChecker(env(settings={"breaks": "verify"})))
    counter.reset(seed=1)
    with pytest.warns(UserWarning, match="NaN"):
        *_, info = counter.step("Three.")
    assert isnan(info["episode"]["r"])


@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
def test_make_vec_works_in_gymnasiums_modes(mode: str, registered: list[str]) -> None:
    kwargs: dict[str, Any] = {"shared_memory": False} if mode == "async" else {}
    vector = gymnasium.make_vec("nemo/math", 2, mode, kwargs, tasks=[ROW], families=["linear"])
    observations, _ = vector.reset(seed=1)
    assert [messages[0]["content"] for messages in observations] == [ROW["responses_create_params"]["input"]] * 2  # type: ignore[index]  # a row's prompt
    _, rewards, *_ = vector.step(["\\boxed{2}", "\\boxed{3}"])
    assert list(rewards) == [1.0, 0.0]
    vector.close()
