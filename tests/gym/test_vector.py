"""`VectorEnv` plays many independent slots of one environment concurrently."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import TransformReward
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics, VectorizeTransformReward

from gymsdk import Environment, UsageError
from gymsdk.gym.vector import VectorEnv, get_info

COUNT = """
import os, signal, threading
from contextlib import asynccontextmanager

class Count(Task):
    number: int

class Open(State):
    number: int

now = peak = opened = entered = 0
closed, lock, gate = [], threading.Lock(), asyncio.Event()

@hookimpl
@asynccontextmanager
async def lifespan():
    global entered
    entered += 1
    yield
    entered -= 1

@hookimpl
def tasks(split: Literal["train", "test"], seed):
    while True:
        seed += 1
        yield Count.ask(f"{split} {seed} 你好", number=seed)

@hookimpl
def reset(task: Count):
    global opened
    opened += 1
    return Reset(state=Open(number=opened))

def arrived(by):
    global now, peak
    with lock:
        now += by
        peak = max(peak, now)

@hookimpl
def tools():
    async def meet(guests: int):
        '''Wait until `guests` calls have arrived.'''
        arrived(1)
        if now >= guests:
            gate.set()
        await asyncio.wait_for(gate.wait(), 20)
        return "met"

    def block():
        '''Block a thread until a second one arrives.'''
        arrived(1)
        try:
            return str(both.wait(20))
        finally:
            arrived(-1)

    async def interrupt():
        '''Send SIGINT to this process, as Ctrl-C does.'''
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    async def dawdle():
        '''Never end.'''
        await asyncio.sleep(600)

    return [meet, block, interrupt, dawdle]

both = threading.Barrier(2)

@hookimpl
def verify(transcript):
    if transcript.reply == "crash":
        raise ValueError("the grader crashed")
    return Verdict(reward=float(transcript.reply == "yes"))

@hookimpl
def close(state: Open):
    closed.append(state.number)
"""

BuildVector: TypeAlias = Callable[..., VectorEnv]


@pytest.fixture
def counting(environment: Callable[..., Environment]) -> Environment:
    return environment(COUNT)


@pytest.fixture
def build_vector(counting: Environment) -> Iterator[BuildVector]:
    """Return a function that creates vectors of the counting environment; the fixture closes them after the test."""
    vectors = []

    def build(num_envs: int = 3, **arguments: Any) -> VectorEnv:
        vectors.append(VectorEnv(counting, num_envs=num_envs, **arguments))
        return vectors[-1]

    yield build
    for vector in vectors:
        vector.close()


def call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function_call", "name": name, "arguments": repr(arguments).replace("'", '"'), "call_id": "c"}]


def test_all_slots_wait_for_a_tool_concurrently(counting: Environment, build_vector: BuildVector) -> None:
    vector = build_vector(256)
    vector.reset(seed=0)
    observations, *_ = vector.step([call("meet", guests=256)] * 256)
    assert counting.plugin.peak == 256
    assert {observation[-1]["content"] for observation in observations} == {"met"}


@pytest.mark.slow
def test_blocking_tools_use_all_threads_of_the_environment(counting: Environment, build_vector: BuildVector) -> None:
    threads = counting._hooks._runner.threads
    counting.plugin.both = counting.plugin.threading.Barrier(threads._limit)
    vector = build_vector(2 * threads._limit)
    vector.reset(seed=0)
    vector.step([call("block")] * vector.num_envs)
    assert counting.plugin.peak == threads._limit


def test_one_lifespan_serves_all_slots_and_close_closes_each_episode_once(
    counting: Environment, build_vector: BuildVector
) -> None:
    vector = build_vector(4)
    with pytest.raises(ResetNeeded, match="slot 0, 1, 2, 3"):
        vector.step(["yes"] * 4)
    vector.reset(seed=0)
    assert counting.plugin.entered == 1
    vector.step(["yes", call("unknown"), "no", call("unknown")])
    vector.close()
    vector.close()
    assert (counting.plugin.entered, sorted(counting.plugin.closed)) == (0, [1, 2, 3, 4])
    vector.reset(seed=0)
    assert vector.step(["yes"] * 4)[1].tolist() == [1.0] * 4
    vector.close()
    assert (counting.plugin.entered, len(counting.plugin.closed)) == (0, 8)


def test_batches_are_in_the_spaces(build_vector: BuildVector) -> None:
    vector = build_vector()
    first, _ = vector.reset(seed=0)
    then, rewards, terminations, truncations, _ = vector.step(vector.action_space.sample())
    assert first in vector.observation_space
    assert then in vector.observation_space
    assert (first.dtype, rewards.dtype, terminations.dtype, truncations.dtype) == (object, np.float64, bool, bool)


@pytest.mark.parametrize(
    "actions",
    [
        ["yes", "no", "yes" * 5],
        ("yes", "no", "yes" * 5),
        np.array(["yes", "no", "yes" * 5]),
        np.array(["yes", "no", "yes" * 5], dtype=object),
    ],
)
def test_any_sequence_of_actions_is_accepted_without_truncation(build_vector: BuildVector, actions: Any) -> None:
    vector = build_vector()
    vector.reset(seed=0)
    assert vector.step(actions)[1].tolist() == [1.0, 0.0, 0.0]
    last = vector.rollouts[2]
    assert last is not None
    assert last.response is not None
    assert last.response["output"][-1]["content"][0]["text"] == "yesyesyesyesyes"


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["yes"], "3 values, one per slot; got 1"),
        ("yes", "got str"),
        ({"role": "assistant"}, "got dict"),
        (None, "got NoneType"),
        (np.array(3), "a zero-dimensional array"),
        (["yes", None, "yes"], "slot 1: an action must be"),
    ],
)
def test_invalid_actions_are_rejected_and_no_slot_steps(build_vector: BuildVector, actions: Any, message: str) -> None:
    vector = build_vector()
    vector.reset(seed=0)
    with pytest.raises(UsageError, match=message):
        vector.step(actions)
    assert vector.rollouts == (None, None, None)
    assert vector.step(["yes"] * 3)[1].tolist() == [1.0] * 3


def test_a_failure_affects_its_own_slot_only(build_vector: BuildVector) -> None:
    vector = build_vector()
    vector.reset(seed=0)
    _, rewards, terminations, truncations, infos = vector.step(["yes", "crash", "no"])
    assert np.array_equal(rewards, [1.0, np.nan, 0.0], equal_nan=True)
    assert (terminations.tolist(), truncations.tolist()) == ([True, False, True], [False, True, False])
    assert "the grader crashed" in get_info(infos, 1)["failure"]["message"]
    assert infos["_failure"].tolist() == [False, True, False]


def test_the_step_after_the_end_resets_and_ignores_the_action(build_vector: BuildVector) -> None:
    vector = build_vector(2)
    vector.reset(seed=0)
    vector.step(["yes", call("unknown")])
    observations, rewards, terminations, _, infos = vector.step([None, "yes"])
    assert observations[0][0]["role"] == "user"
    assert (rewards.tolist(), terminations.tolist()) == ([0.0, 1.0], [False, True])
    assert infos["_task_id"].tolist() == [True, False]


def test_same_step_mode_also_returns_the_last_observation_and_info_and_keeps_the_rollout(
    build_vector: BuildVector,
) -> None:
    vector = build_vector(2, autoreset_mode="same_step")
    vector.reset(seed=0)
    observations, rewards, terminations, _, infos = vector.step(["yes", call("unknown")])
    assert observations[0][0]["role"] == "user"
    assert (rewards.tolist(), terminations.tolist()) == ([1.0, 0.0], [True, False])
    assert infos["final_obs"].tolist() == [[], None]
    assert get_info(infos, 0)["final_info"]["verdict"]["reward"] == 1.0
    assert infos["_final_info"].tolist() == [True, False]
    vector.step([call("unknown"), "no"])
    assert [rollout and rollout.reward for rollout in vector.rollouts] == [1.0, 0.0]


def test_in_disabled_mode_an_ended_slot_waits_for_its_reset(build_vector: BuildVector) -> None:
    vector = build_vector(2, autoreset_mode="disabled")
    vector.reset(seed=0)
    before, *_ = vector.step(["yes", call("unknown")])
    with pytest.raises(ResetNeeded, match="slot 0;"):
        vector.step(["yes", "yes"])
    observations, infos = vector.reset(options={"reset_mask": np.array([True, False])})
    assert observations[1] == before[1]
    assert infos["_seed"].tolist() == [True, False]
    assert vector.step(["yes", "yes"])[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True, False, False], "boolean array"),
        (np.array([1, 0, 0]), "boolean array"),
        (np.array([True, False]), "3 values, one per slot"),
        (np.array([False] * 3), "selects no slot"),
        (np.array([True, False, False]), "leaves out slot 1, 2"),
    ],
)
def test_an_invalid_reset_mask_is_rejected(build_vector: BuildVector, mask: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_vector().reset(options={"reset_mask": mask})


def test_slots_get_consecutive_seeds(build_vector: BuildVector) -> None:
    vector = build_vector()
    _, counted = vector.reset(seed=7)
    _, listed = build_vector().reset(seed=[7, 8, 9])
    assert counted["seed"].tolist() == [7, 8, 9]
    assert counted["task_id"].tolist() == listed["task_id"].tolist()
    # A slot without a new seed keeps its generator.
    _, infos = vector.reset(seed=[None, 8, None])
    assert infos["seed"][1] == 8
    assert vector.np_random_seed == (7, 8, 9)


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, "3"], 2.5, "abc"])
def test_an_invalid_seed_is_rejected(build_vector: BuildVector, seed: Any) -> None:
    with pytest.raises(UsageError, match="one per slot"):
        build_vector().reset(seed=seed)


def test_an_invalid_action_consumes_no_task(build_vector: BuildVector) -> None:
    vector, other = build_vector(2), build_vector(2)
    for entry in (vector, other):
        entry.reset(seed=3)
        entry.step(["yes", call("unknown")])
    with pytest.raises(UsageError, match="slot 1"):
        vector.step(["yes", None])
    drawn = [item.step(["yes", "yes"])[-1]["task_id"][0] for item in (vector, other)]
    assert drawn[0] == drawn[1]


def test_one_task_serves_all_slots_and_a_list_has_one_per_slot(build_vector: BuildVector) -> None:
    vector = build_vector()
    _, one = vector.reset(seed=0, options={"task": 4, "split": "test"})
    _, many = vector.reset(seed=0, options={"task": [1, "train:5:0", None]})
    assert set(one["task_id"]) == {"test:0:4"}
    assert many["task_id"].tolist()[:2] == ["train:0:1", "train:5:0"]
    with pytest.raises(UsageError, match="got a list of 2"):
        vector.reset(options={"task": [1, 2]})


def test_ctrl_c_leaves_every_slot_closed_or_usable(counting: Environment, build_vector: BuildVector) -> None:
    vector = build_vector()
    vector.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        vector.step([call("interrupt"), "yes", call("dawdle")])
    # The signal may come before slot 1 has played its turn; then its episode goes on.
    assert sorted(counting.plugin.closed) in ([1, 2, 3], [1, 3])
    with pytest.raises(ResetNeeded, match=r"slot 0, (1, )?2;"):
        vector.step(["yes"] * 3)
    vector.reset(seed=0)
    assert vector.step(["yes"] * 3)[1].tolist() == [1.0] * 3


def test_ansi_mode_returns_a_text_per_slot(build_vector: BuildVector) -> None:
    vector = build_vector(2, render_mode="ansi")
    vector.reset(seed=[4, 5])
    vector.step(["好的 😀", call("unknown")])
    first, second = vector.render() or ()
    assert "好的 😀" in first
    assert "unknown" in second


def test_gymnasiums_wrappers_work(build_vector: BuildVector) -> None:
    vector = RecordEpisodeStatistics(
        VectorizeTransformReward(build_vector(2), wrapper=TransformReward, func=lambda reward: 10 * reward)
    )
    vector.reset(seed=0)
    *_, infos = vector.step(["yes", call("unknown")])
    assert infos["episode"]["r"].tolist() == [10.0, 0.0]
    assert get_info(infos, 0)["episode"]["l"] == 1
    listed = DictInfoToList(build_vector(2))
    listed.reset(seed=0)
    *_, slot_infos = listed.step(["yes", call("unknown")])
    assert (slot_infos[0]["verdict"]["reward"], slot_infos[1]) == (1.0, {})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_plays_with_its_own_slots(counting: Environment, build_vector: BuildVector) -> None:
    vector = build_vector(2)
    vector.reset(seed=0)
    if not (child := os.fork()):
        vector.reset(seed=0)
        os._exit(int(vector.step(["yes", "no"])[1].sum()) + 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert vector.step(["yes", "yes"])[1].sum() == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs must be a positive integer, got 0"),
        ({"num_envs": 2.0}, "num_envs must be a positive integer"),
        ({"autoreset_mode": "nextstep"}, "did you mean 'next_step'"),
        ({"autoreset_mode": None}, "one of next_step, same_step, disabled"),
        ({"render_mode": "rgb_array"}, "'ansi', 'human' or None"),
    ],
)
def test_invalid_arguments_are_rejected_with_an_explanation(
    counting: Environment, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        VectorEnv(counting, **arguments)


def test_a_second_thread_is_rejected_while_another_steps(counting: Environment, build_vector: BuildVector) -> None:
    vector = build_vector(1)
    with vector._lock.hold(vector._rebuild_after_fork), pytest.raises(UsageError, match="another thread"):
        vector.reset()
