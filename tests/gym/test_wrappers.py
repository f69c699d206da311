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

# From Python 3.12 on, to fork beside a thread is warned of: Gymnasium's asynchronous vector does.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

Make = Callable[..., Env]

ROW = {"responses_create_params": {"input": "What is 1 + 1? 你好 👩‍💻"}, "question": "1 + 1", "expected_answer": "2"}


def test_statistics_count_turns_and_sum_rewards(env: Make) -> None:
    counting = RecordEpisodeStatistics(env())
    counting.reset(seed=1)
    counting.step(call("add", by=3))
    *_, info = counting.step("Three.")
    assert (info["episode"]["r"], info["episode"]["l"]) == (1.0, 2)


def test_statistics_of_a_failure_are_nan(env: Make) -> None:
    counting = RecordEpisodeStatistics(env(settings={"breaks": "verify"}))
    counting.reset(seed=1)
    *_, info = counting.step("Three.")
    assert isnan(info["episode"]["r"])


def test_a_time_limit_beyond_the_turns_changes_nothing(env: Make) -> None:
    counting = TimeLimit(env(turns=1), 5)
    counting.reset(seed=1)
    *_, truncated, info = counting.step(call("add", by=3))
    assert (truncated, info["verdict"]["reward"]) == (True, 1.0)


def test_order_is_enforced(env: Make) -> None:
    counting = OrderEnforcing(env())
    with pytest.raises(ResetNeeded):
        counting.step("Three.")
    counting.reset(seed=1)
    assert counting.step("Three.")[2]


def test_rewards_are_transformed(env: Make) -> None:
    counting = TransformReward(env(turns=1), lambda reward: 2 * reward)
    counting.reset(seed=1)
    assert counting.step(call("add", by=3))[1] == 2.0


def test_the_passive_checker_finds_nothing_in_an_episode(env: Make) -> None:
    counting = PassiveEnvChecker(env())
    counting.reset(seed=1)
    counting.step(call("add", by=3))
    assert counting.step("Three.")[1] == 1.0


def test_the_passive_checker_warns_of_a_failures_nan(env: Make) -> None:
    counting = PassiveEnvChecker(env(settings={"breaks": "verify"}))
    counting.reset(seed=1)
    with pytest.warns(UserWarning, match="NaN"):
        counting.step("Three.")


def test_gymnasiums_sync_vector_plays_it(env: Make) -> None:
    vector = SyncVectorEnv([lambda: env(turns=1)] * 2)
    seen, info = vector.reset(seed=1)
    assert [messages[1]["content"] for messages in seen] == ["Episode 1.", "Episode 2."]
    assert "你好 👩‍💻" in seen[0][0]["content"]
    _, rewards, terminated, truncated, info = vector.step([call("add", by=3), "No."])
    assert (list(rewards), list(terminated), list(truncated)) == ([1.0, 0.0], [False, True], [True, False])
    assert list(info["outcome"]) == ["scored", "scored"]
    vector.close()


def made() -> Env:
    return Env("math", tasks=[ROW])


def test_gymnasiums_async_vector_plays_it_without_shared_memory() -> None:
    vector = AsyncVectorEnv([made, made], shared_memory=False)
    seen, _ = vector.reset(seed=1)
    assert [messages[0]["content"] for messages in seen] == [ROW["responses_create_params"]["input"]] * 2  # type: ignore[index]  # a row's prompt
    _, rewards, *_ = vector.step(["\\boxed{2}", "\\boxed{3}"])
    assert list(rewards) == [1.0, 0.0]
    vector.close()


@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
def test_gymnasiums_async_vector_refuses_shared_memory_instead_of_garbling_text(codec: str) -> None:
    def make() -> Env:
        return Env("math", tasks=[ROW], codec=codec)

    with pytest.raises(ValueError, match="shared_memory"):
        AsyncVectorEnv([make])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec_in_gymnasiums_modes(mode: str, registered: list[str]) -> None:
    kwargs: dict[str, Any] = {"shared_memory": False} if mode == "async" else {}
    vector = gymnasium.make_vec("nemo/math", 2, mode, kwargs, tasks=[ROW])
    assert len(vector.reset(seed=1)[0]) == 2
    vector.close()
