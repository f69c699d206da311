"""Gymnasium's own wrappers and vectors around an environment."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit, TransformReward

from gymsdk.gym.env import Env

from .conftest import call

# Since Python 3.12 a fork beside a thread gives a warning; Gymnasium's asynchronous vector forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

Make = Callable[..., Env]

ROW = {"responses_create_params": {"input": "What is 1 + 1? 你好 👩‍💻"}, "question": "1 + 1", "expected_answer": "2"}


def test_episode_statistics_count_turns_and_sum_rewards(env: Make) -> None:
    counter = RecordEpisodeStatistics(env())
    counter.reset(seed=1)
    counter.step(call("add", by=3))
    *_, info = counter.step("Three.")
    assert (info["episode"]["r"], info["episode"]["l"]) == (1.0, 2)


def test_episode_statistics_of_a_failure_are_nan(env: Make) -> None:
    counter = RecordEpisodeStatistics(env(settings={"breaks": "verify"}))
    counter.reset(seed=1)
    *_, info = counter.step("Three.")
    assert isnan(info["episode"]["r"])


def test_a_time_limit_above_the_turn_budget_changes_nothing(env: Make) -> None:
    counter = TimeLimit(env(turns=1), 5)
    counter.reset(seed=1)
    *_, truncated, info = counter.step(call("add", by=3))
    assert (truncated, info["verdict"]["reward"]) == (True, 1.0)


def test_order_is_enforced(env: Make) -> None:
    counter = OrderEnforcing(env())
    with pytest.raises(ResetNeeded):
        counter.step("Three.")
    counter.reset(seed=1)
    assert counter.step("Three.")[2]


def test_rewards_are_transformed(env: Make) -> None:
    counter = TransformReward(env(turns=1), lambda reward: 2 * reward)
    counter.reset(seed=1)
    assert counter.step(call("add", by=3))[1] == 2.0


def test_the_passive_checker_reports_no_problem(env: Make) -> None:
    counter = PassiveEnvChecker(env())
    counter.reset(seed=1)
    counter.step(call("add", by=3))
    assert counter.step("Three.")[1] == 1.0


def test_the_passive_checker_warns_about_the_nan_of_a_failure(env: Make) -> None:
    counter = PassiveEnvChecker(env(settings={"breaks": "verify"}))
    counter.reset(seed=1)
    with pytest.warns(UserWarning, match="NaN"):
        counter.step("Three.")


def test_gymnasiums_sync_vector_works(env: Make) -> None:
    vector = SyncVectorEnv([lambda: env(turns=1)] * 2)
    observations, info = vector.reset(seed=1)
    assert [messages[1]["content"] for messages in observations] == ["Episode 1.", "Episode 2."]
    assert "你好 👩‍💻" in observations[0][0]["content"]
    _, rewards, terminated, truncated, info = vector.step([call("add", by=3), "No."])
    assert (list(rewards), list(terminated), list(truncated)) == ([1.0, 0.0], [False, True], [True, False])
    assert list(info["outcome"]) == ["scored", "scored"]
    vector.close()


def build_env() -> Env:
    return Env("math", tasks=[ROW])


def test_gymnasiums_async_vector_works_without_shared_memory() -> None:
    vector = AsyncVectorEnv([build_env, build_env], shared_memory=False)
    observations, _ = vector.reset(seed=1)
    assert [messages[0]["content"] for messages in observations] == [ROW["responses_create_params"]["input"]] * 2  # type: ignore[index]  # a row's prompt
    _, rewards, *_ = vector.step(["\\boxed{2}", "\\boxed{3}"])
    assert list(rewards) == [1.0, 0.0]
    vector.close()


@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
def test_gymnasiums_async_vector_rejects_shared_memory_instead_of_garbling_text(codec: str) -> None:
    def build_env_with_codec() -> Env:
        return Env("math", tasks=[ROW], codec=codec)

    with pytest.raises(ValueError, match="shared_memory"):
        AsyncVectorEnv([build_env_with_codec])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec_works_in_gymnasiums_modes(mode: str, registered: list[str]) -> None:
    kwargs: dict[str, Any] = {"shared_memory": False} if mode == "async" else {}
    vector = gymnasium.make_vec("nemo/math", 2, mode, kwargs, tasks=[ROW])
    assert len(vector.reset(seed=1)[0]) == 2
    vector.close()
